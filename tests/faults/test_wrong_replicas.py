"""A replica that went wrong is named, and never becomes everyone's by way of a state; nor does code that was edited."""

import shutil

import pytest
from support import FOLDER
from support.commands import train

from dure.base.run_folder import RunFolder
from dure.observe.events import Proved, read_events

JOB = """
[model]
factory = "drifting.py:model"
args = { folder = "HERE" }
[data]
factory = "drifting.py:data"
global_batch = 40
[train]
steps = 45
lr = 1e-2
prove_every = 0
[team]
ranks = 4
shards = 8
[checkpoint]
memory_every = 1
"""


@pytest.fixture
def job(tmp_path):
    shutil.copy(FOLDER / "drifting.py", tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("HERE", str(tmp_path)))
    return path


def args(job, **given):
    words = ", ".join(f"{name} = {value}" for name, value in given.items())
    return f'--set=model.args={{ folder = "{job.parent}", {words} }}'


@pytest.mark.parametrize(("wrong", "by"), [(1, "state"), (0, "state"), (2, "proof")])
def test_a_replica_that_went_wrong_is_found_and_named_by_majority(job, tmp_path, wrong, by):
    (tmp_path / "flipped").touch()
    looks = ["--set=train.prove_every=1", "--set=checkpoint.memory_every=0"] if by == "proof" else []
    ended = train(job, tmp_path / "run", args(job, flips=wrong), *looks)
    assert ended.code == 3, ended.err
    last = ended.err.strip().splitlines()[-1]
    assert f"rank(s) {wrong} hold other bits of n.2.weight than the other ranks" in last
    if by == "proof":  # in the same step
        proved = [e for e in read_events(RunFolder(tmp_path / "run").events(0)) if isinstance(e, Proved)]
        assert f"after step {len(proved)} rank(s) 2 " in last
    assert (tmp_path / "flipped-it").exists()


def test_a_wrong_replicas_part_does_not_become_everyones_when_the_team_starts_again(job, tmp_path):
    """The weight is changed, a state is kept with it, and a rank dies before anybody could have looked."""
    undisturbed = train(job, tmp_path / "quiet").summary["weights_sha256"]
    for name in ("flipped", "died"):
        (tmp_path / name).touch()
    ended = train(job, tmp_path / "run", args(job, flips=1, dies=2, after=60, passes=2))
    assert (tmp_path / "flipped-it").exists()
    assert (tmp_path / "died-it").exists()
    assert ended.summary["weights_sha256"] == undisturbed


def test_code_that_is_edited_in_the_middle_of_a_run_is_noticed_when_a_rank_dies(job, tmp_path):
    (tmp_path / "died").touch()
    module = tmp_path / "drifting.py"
    edited = module.read_text().replace(
        '(self.folder / what).rename(self.folder / f"{what}-it")',
        '(self.folder / what).rename(self.folder / f"{what}-it")\n'
        '            Path(__file__).write_text(Path(__file__).read_text().replace("SCALE = 1.0", "SCALE = 2.0"))',
    )
    module.write_text(edited)
    ended = train(job, tmp_path / "run", args(job, dies=2))
    assert (tmp_path / "died-it").exists()
    assert ended.code == 2, ended.err
    last = ended.err.strip().splitlines()[-1]
    assert "drifting.py is changed" in last
    assert "Undo the change" in last


def test_code_that_is_edited_between_two_starts_is_noticed(job, tmp_path):
    """A partial in the factory's file, and a module that it imports."""
    (tmp_path / "helper.py").write_text(
        "from drifting import Net\n\ndef made(folder, width): return Net(folder, -1, -1, 60, 4)\n"
    )
    (tmp_path / "mine.py").write_text(
        "import functools, helper\nmodel = functools.partial(helper.made, width=3)\n"
    )
    options = [f"--set=model.factory={tmp_path}/mine.py:model", "--ranks=1"]
    assert train(job, tmp_path / "run", *options, "--set=train.steps=4").code == 0
    for name, before, after in (("mine.py", "width=3", "width=4"), ("helper.py", "60", "61")):
        original = (tmp_path / name).read_text()
        (tmp_path / name).write_text(original.replace(before, after))
        ended = train(job, tmp_path / "run", *options, "--set=train.steps=8")
        assert ended.code == 2, ended.err
        assert f"{name} is changed" in ended.err.strip().splitlines()[-1]
        (tmp_path / name).write_text(original)
