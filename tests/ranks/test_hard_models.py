"""What once broke the promise of the same bits, or of an end, does not any more."""

import pytest
from support import hard_models

from dure.base.errors import RankFailed
from dure.base.run_folder import RunFolder
from dure.config import load_job
from dure.data.ledger import verdict
from dure.launch import run_team
from dure.observe.events import Evaluated, read_events


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every case on one rank, in this process, and on 3."""
    folder = RunFolder(tmp_path_factory.mktemp("hard"))
    on_three = run_team("support.hard_models:train_all", (), ranks=3, folder=folder, hang_seconds=300)
    return {1: [hard_models.train_all()], 3: on_three}


@pytest.mark.parametrize("name", hard_models.CASES)
def test_the_same_bits_on_1_and_3_ranks(trained, name):
    one = trained[1][0][name]
    for ranks, results in trained.items():
        assert [result[name] for result in results] == [one] * ranks


def test_ranks_without_samples_train_on_without_synchronisation(tmp_path):
    """19 samples in batches of 16: in the last step only the first three shards have any."""
    shas = run_team(
        "support.hard_models:train_apart", (19,), ranks=4, folder=RunFolder(tmp_path), hang_seconds=300
    )
    assert len(set(shas)) == 4


def test_a_failure_in_the_communication_thread_ends_the_step(tmp_path):
    with pytest.raises(RankFailed, match="only one element tensors"):
        run_team(
            "support.hard_models:loss_with_a_bad_count",
            (),
            ranks=2,
            folder=RunFolder(tmp_path),
            hang_seconds=300,
        )


def test_gradients_that_are_not_finite_do_not_reach_the_weights(tmp_path):
    with pytest.raises(RankFailed, match=r"not finite in shard 0 .*at step 0, though the loss is finite"):
        run_team(
            "support.hard_models:nan_in_the_gradients_alone",
            (),
            ranks=2,
            folder=RunFolder(tmp_path),
            hang_seconds=300,
        )


JOB = """
[model]
factory = "support.hard_models:plain"
[data]
factory = "support.hard_models:Points"
global_batch = 16
[eval]
factory = "support.hard_models:Points"
args = { samples = 19 }
every_epochs = 1
[train]
epochs = 2
"""


def test_the_last_epoch_is_judged_once(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    loaded, folder = load_job(tmp_path / "job.toml"), RunFolder(tmp_path / "run")
    arguments = (loaded.to_json(), str(folder.path))
    results = run_team("dure.train:run_rank", arguments, ranks=2, folder=folder, hang_seconds=300)
    judged = [event.step for event in read_events(folder.events(0)) if isinstance(event, Evaluated)]
    assert judged == [3, 7]
    assert verdict([result.ledger for result in results], 61, together=True).eval_exactly_once
