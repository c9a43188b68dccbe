"""`weights_sha256` never depends on the number of ranks, and a second run gives it again.

Every run proves at every step that parameters, buffers and optimizer state agree on all ranks
(`train.prove_every = 1`; a difference ends the run with exit code 3). `make soak` runs every job whole.
"""

import json

import pytest
from support.alone import train_alone
from support.commands import EXAMPLES, train

from dure.base.run_folder import RunFolder
from dure.observe.events import Proved, read_events

ODD = (
    "--set", "data.args.count=43", "--set", "data.global_batch=20", "--set", "train.epochs=40",
    "--set", "train.schedule_args.T_max=120",
)  # fmt: skip
"""43 samples in batches of 20: the last batch has 3, fewer than the shards."""


def job_of(name, storage):
    if name == "cats":
        return EXAMPLES / "cats.toml", ("--set", f"storage={storage}")
    if name == "odd":
        return EXAMPLES / "cnn_batchnorm.toml", ODD
    return EXAMPLES / f"{name}.toml", ()


def run(name, ranks, storage, folder, *arguments):
    job, settings = job_of(name, storage)
    every_step = ("--set", "train.prove_every=1")
    return train(
        job, folder, "--ranks", ranks, *settings, *every_step, *arguments, deadline_seconds=500
    ).summary


def steps_proved(folder, ranks):
    return [
        [e.step for e in read_events(RunFolder(folder).events(r)) if isinstance(e, Proved)]
        for r in range(ranks)
    ]


@pytest.mark.parametrize(
    ("name", "epochs", "teams"),
    [
        ("tiny_transformer", 1, (3,)),
        pytest.param("cnn_batchnorm", 1, (2,), marks=pytest.mark.soak),  # "odd" is the same model
        ("cats", 1, (4,)),
        ("odd", 12, (5,)),  # 36 steps; more than 100 in `make soak`
    ],
)
def test_short_runs_have_the_same_bits_on_every_number_of_ranks(name, epochs, teams, storage, tmp_path):
    """Each against one rank."""
    job, settings = job_of(name, storage)
    settings = dict(setting.split("=", 1) for setting in settings if setting != "--set")
    settings |= {"train.prove_every": "1", "train.epochs": str(epochs)}
    alone = train_alone(job, tmp_path / "alone", settings)
    shas = {1: (alone.weights_sha256, alone.recipe, alone.loss, str(alone.metrics))}
    for ranks in teams:
        folder = tmp_path / f"{name}-{ranks}"
        summary = run(name, ranks, storage, folder, "--set", f"train.epochs={epochs}")
        shas[ranks] = (summary["weights_sha256"], summary["recipe"], summary["loss"], str(summary["metrics"]))
        assert summary["ledger"]["exactly_once"] is True
        assert len(set(summary["fingerprints"])) == 1
        assert len(summary["fingerprints"]) == ranks
        assert summary["apart"] is None
        proved = steps_proved(folder, ranks)
        assert proved == [[*range(summary["steps"]), summary["steps"] - 1]] * ranks
    assert len(set(shas.values())) == 1, shas


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["tiny_transformer", "cnn_batchnorm", "cats", "odd"])
def test_100_steps_have_the_same_bits_on_1_2_3_4_5_and_8_ranks_and_again(name, storage, tmp_path):
    found = {}
    for attempt, ranks in enumerate([1, 2, 3, 4, 5, 8, 4]):
        summary = run(name, ranks, storage, tmp_path / f"{name}-{attempt}")
        assert summary["steps"] >= 100
        assert summary["ledger"]["exactly_once"] is True
        found[attempt, ranks] = (
            summary["weights_sha256"], summary["recipe"], summary["loss"], str(summary["metrics"])
        )  # fmt: skip
        proved = steps_proved(tmp_path / f"{name}-{attempt}", ranks)
        assert proved == [[*range(summary["steps"]), summary["steps"] - 1]] * ranks
    print(json.dumps({f"{name} on {ranks}": sha for (_, ranks), (sha, *_) in found.items()}))
    assert len(set(found.values())) == 1
