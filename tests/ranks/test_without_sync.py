"""`sync = false` really trains different models, and the run says how far apart they are."""

from support.alone import train_alone
from support.commands import EXAMPLES, train

from dure.observe.summary import Ledger, Summary, in_words


def test_four_ranks_without_sync_are_four_different_models(storage, tmp_path):
    short = ("--set", f"storage={storage}", "--set", "train.epochs=1", "--ranks", 4)
    apart = train(EXAMPLES / "cats.toml", tmp_path / "apart", *short, "--set", "team.sync=false").summary
    assert len(set(apart["fingerprints"])) == 4
    assert apart["apart"]["largest"] > 1e-3
    assert 0 < apart["apart"]["rms"] < apart["apart"]["largest"]
    assert len(apart["metrics_by_rank"]) == 4
    assert apart["ledger"]["exactly_once"] is True
    # What the same job is with synchronisation, test_same_bits says; here, that it is another recipe.
    settings = {"storage": str(storage), "train.epochs": "1"}
    assert train_alone(EXAMPLES / "cats.toml", tmp_path / "alone", settings).recipe != apart["recipe"]


def summary(**changes):
    facts = {
        "run": "runs/x",
        "name": "x",
        "steps": 10,
        "epochs": 2,
        "ranks": 2,
        "shards": 8,
        "threads": 1,
        "device": "cpu",
        "sync": True,
        "parameters": 1234,
        "samples": 400,
        "loss": 0.5,
        "metrics": {"loss": 0.4, "accuracy": 0.97},
        "samples_seen": 800,
        "samples_per_second": 100.0,
        "recipe": "ab" * 32,
        "weights_sha256": "cd" * 32,
        "fingerprints": ["f" * 16, "f" * 16],
        "seconds": {"launch": 1.0, "train": 8.0},
        "ledger": Ledger(2, True),
        "completely_recorded": True,
        "apart": None,
        "metrics_by_rank": None,
    }
    return Summary(**{**facts, **changes})


def test_the_summary_speaks_english_and_korean():
    english, korean = in_words(summary(), "en"), in_words(summary(), "ko")
    assert "each exactly once per epoch" in english
    assert "all the same" in english
    assert "97.0%" in english
    assert "에포크마다 각각 정확히 한 번" in korean
    assert "모두 같음" in korean
    apart = summary(fingerprints=["a", "b"], apart={"largest": 0.5, "rms": 0.1}, sync=False)
    assert "2 different models" in in_words(apart, "en")
    assert "서로 다른 모델 2개" in in_words(apart, "ko")
    wrong = summary(ledger=Ledger(2, False, repeated=(3,), missing=(7,)))
    assert "repeated [3], missing [7]" in in_words(wrong, "en")
