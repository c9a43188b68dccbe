"""Where two runs part, to the step and the tensor: their receipts first, then replays where these say too little.

A receipt has a record of each step, but fingerprints of some gradients only, and roots of states now and then. What
these do not see is found by computing both runs again up to states in between: a binary search, two replays for each.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from dure.base.errors import DureError, ReceiptWrong, UsageError
from dure.base.files import read_at_most
from dure.base.run_folder import RunFolder
from dure.config import LONGEST_JOB, LoadedJob
from dure.engine.replay import Replayed, checkpoints_of, state_after
from dure.proof.compare_receipts import Difference, State, compare, last_state
from dure.proof.receipt import NO_ROOT, merkle_root
from dure.proof.stored_tensors import of_checkpoint

_SAMPLES = ("other samples", "other content of its samples")


def diff(one: Path, other: Path, *, ranks: int = 1, replays: bool = True) -> Difference:
    """The first difference between two runs; with `replays`, those that have their jobs are computed again in parts."""
    found = compare(one, other)
    if found.step is None or found.what in _SAMPLES or not replays:
        return found
    if not (has_job(one) and has_job(other)):
        found.not_replayed = "a replay needs the folders of both runs, with their jobs"
        return found
    by_receipts = replace(found)
    try:
        _Search((one, other), found, ranks).run()
    except DureError as error:  # code or data that is gone, a machine of another arithmetic
        return replace(by_receipts, replays=found.replays, not_replayed=str(error))
    return found


def has_job(run: Path) -> bool:
    """Whether a run can be computed again."""
    with contextlib.suppress(OSError, ValueError):
        LoadedJob.from_json(read_at_most(RunFolder(run).job, LONGEST_JOB * 4).decode())
        return True
    return False


class _Search:
    """Narrows down where two runs part, from a state that both share to one that they do not."""

    def __init__(self, runs: tuple[Path, Path], found: Difference, ranks: int) -> None:
        assert found.step is not None
        self._runs, self._found, self._ranks = runs, found, ranks
        self._known: dict[tuple[Path, int], State] = {}
        self._by_record = not found.what.endswith("after it")
        self._recorded = (found.step, found.what)
        self._same = min(found.same_until, found.step)
        """The newest state that both are known to share: after so many steps."""

    def run(self) -> None:
        """Fill in what was found."""
        found = self._found
        same, other = self._same, self._recorded[0] + 1
        if not found.recipe and self._find_wrong(other):
            return
        differing: list[str] = []
        while other - same > 1:
            middle = (same + other) // 2
            tensors = self._compare(middle)
            if tensors is None:
                return
            if tensors:
                other, differing = middle, tensors
            else:
                same = self._same = middle
        found.same_until, found.step = same, other - 1
        if other - 1 < self._recorded[0]:
            found.what = "the state after it"
        elif not self._by_record and not differing:
            differing = self._compare(other) or []
        if differing:
            found.tensors, found.tensors_after = differing, other

    def _find_wrong(self, until: int) -> bool:
        """Of two runs of one recipe at most one is right: whether one of them is not what a replay gives."""
        for number, run in enumerate(self._runs, 1):
            done = self._replay(run, until)
            stored = self._stored(run, until)
            if done.difference or (stored and done.state and stored.differs_from(done.state)):
                self._blame(number, run, done)
                return True
        return False

    def _blame(self, number: int, run: Path, done: Replayed) -> None:
        """A run cannot be had again as it was: the first record that differs says where, its states which tensor."""
        found, stored = self._found, self._stored(run, done.end)
        told = done.difference or f"its state after {done.end} steps is not what a replay gives"
        found.wrong = f"run {number} ({run}): {told}"
        right = done.state or self._known.get((self._runs[number % 2], done.end))
        if stored is not None and right is not None:
            found.tensors, found.tensors_after = stored.differs_from(right), done.end
        if not self._by_record:
            self._narrow(run, self._runs[number % 2], done.end)

    def _narrow(self, wrong: Path, right: Path, end: int) -> None:
        """Between which of its checkpoints a run went wrong, unseen by its records: the other tells what is right."""
        found, same, kept = self._found, self._same, sorted(checkpoints_of(wrong))
        between = [step for step in kept if same < step < end]
        while between:
            middle = between[len(between) // 2]
            own, other = self._stored(wrong, middle), self._replay(right, middle).state
            if own is None or other is None:
                return
            if differing := own.differs_from(other):
                found.step, found.tensors, found.tensors_after = middle - 1, differing, middle
                between = [step for step in between if step < middle]
            else:
                found.same_until = self._same = middle
                between = [step for step in between if step > middle]

    def _compare(self, steps: int) -> list[str] | None:
        """The tensors that differ after so many steps; None when one of the runs is found to be wrong."""
        states = []
        for number, run in enumerate(self._runs, 1):
            state = self._known.get((run, steps)) or self._stored(run, steps)
            if state is None:
                done = self._replay(run, steps)
                if done.difference:
                    self._blame(number, run, done)
                    return None
                state = done.state
            if state is None:
                raise UsageError(f"{run} could not be computed again up to step {steps}")
            states.append(state)
        return states[0].differs_from(states[1])

    def _replay(self, run: Path, steps: int) -> Replayed:
        self._found.replays += 1
        # A checkpoint from after the difference may be what is wrong.
        done = state_after(run, steps, self._ranks, newest=self._same)
        if done.state is not None:
            self._known[run, steps] = done.state
        return done

    @staticmethod
    def _stored(run: Path, steps: int) -> State | None:
        """The state after so many steps, if the run has kept it."""
        ended = last_state(RunFolder(run).receipt)
        if ended is not None and ended.step == steps:
            return ended
        place = checkpoints_of(run).get(steps)
        if place is None:
            return None
        try:
            _, leaves = of_checkpoint(place)
        except (ReceiptWrong, OSError):
            return None
        model = {name: leaf.hex() for name, leaf in leaves.items() if name.startswith("model/")}
        rest = [leaf for name, leaf in leaves.items() if name not in model]
        return State(steps, model, (merkle_root(rest) if rest else NO_ROOT).hex())
