"""What was asked to stay stays, and the newest always."""

from hypothesis import given
from hypothesis import strategies as st

from dure.checkpoint.writer import Retention, Saved, removable


@given(
    st.sets(st.integers(0, 60), min_size=1),
    st.integers(1, 4),
    st.integers(0, 10),
    st.sampled_from([None, "loss", "accuracy"]),
    st.randoms(use_true_random=False),
)
def test_exactly_those_that_nobody_asked_for_may_go(steps, last, every, best, dice):
    saved = [
        Saved(f"s{s}", s, {"loss": dice.random(), "accuracy": dice.random()} if s % 2 else {}) for s in steps
    ]
    dice.shuffle(saved)
    gone = {int(name[1:]) for name in removable(saved, Retention(last, every, best))}
    newest = set(sorted(steps)[-last:])
    multiples = {s for s in steps if every and s % every == 0}
    evaluated = [each for each in saved if each.metrics]
    champion = set()
    if best is not None and evaluated:
        sign = 1 if best == "loss" else -1
        values = {each.step: sign * each.metrics[best] for each in evaluated}
        champion = {
            max(step for step in values if values[step] == min(values.values()))
        }  # of equals, the newest
    assert gone == steps - newest - multiples - champion


def test_a_metric_that_is_not_a_number_is_never_the_best():
    saved = [
        Saved("a", 1, {"loss": float("nan")}),
        Saved("b", 2, {"loss": 0.5}),
        Saved("c", 3, {}),
        Saved("d", 4, {}),
    ]
    assert removable(saved, Retention(1, 0, "loss")) == ["a", "c"]
