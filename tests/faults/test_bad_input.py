"""Whatever is wrong, one clear line says so; the exit code is right and nothing is left behind."""

import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from support import FOLDER
from support.commands import dure, train
from support.leftovers import family, no_new_family, no_new_shared_memory, shared_memory

from dure.base.errors import DureError
from dure.base.run_folder import RunFolder
from dure.config import load_job
from dure.train import run_rank

JOB = """
name = "bad"
[model]
factory = "{here}/broken.py:model"
[data]
factory = "{here}/broken.py:numbers"
global_batch = 16
shuffle = false
[train]
lr = 0.01
epochs = 2
[team]
ranks = 2
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("{here}", str(FOLDER)))
    return path


@pytest.fixture(autouse=True)
def nothing_left():
    processes, shared = family(), shared_memory()
    yield
    no_new_family(processes)
    no_new_shared_memory(shared)


def broken(name):
    return f"{FOLDER}/broken.py:{name}"


def fails(ended, code, *words):
    assert ended.code == code, (ended.code, ended.err, ended.out)
    last = ended.err.strip().splitlines()[-1]
    for word in words:
        assert word in last, last
    assert "Traceback" not in last
    assert ended.out == ""


def test_a_missing_job_file(tmp_path):
    fails(train(tmp_path / "nowhere.toml", tmp_path / "run"), 2, "no job file", "nowhere.toml")
    assert not (tmp_path / "run").exists()


def test_bad_toml(job, tmp_path):
    job.write_text("[model\n")
    fails(train(job, tmp_path / "run"), 2, "not valid TOML")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.lerning_rate=1", ["unknown key train.lerning_rate"]),
        ("train.loses=1", ["unknown key", "train.loss"]),
        ("data.global_batch=many", ["data.global_batch", "'many'"]),
        ("data.global_batch=0", ["data.global_batch is 0"]),
        ("team.ranks=9", ["team.ranks is 9", "8 shards"]),
        ("nonsense", ["section.key=value"]),
    ],
)
def test_a_setting_that_cannot_be(job, tmp_path, setting, words):
    fails(train(job, tmp_path / "run", "--set", setting), 2, *words)
    assert not (tmp_path / "run").exists()


REFUSED_BY_A_RANK = {
    "a factory that does not exist": (["model.factory=broken.py:nothing"], ["broken.py", "model.factory"]),
    "a name that does not exist": (
        ["model.factory=" + broken("nothing")],
        ["has no nothing", "model.factory"],
    ),
    "a module that does not exist": (["data.factory=no.such.module:x"], ["data.factory", "no.such.module"]),
    "a factory that raises": (["model.factory=" + broken("raising_model")], ["RuntimeError: no model today"]),
    "an argument that does not fit": (["data.args.size=3"], ["data.factory", "size"]),
    "an empty dataset": (["data.args.samples=0"], ["the dataset is empty"]),
    "an iterable dataset": (["data.factory=" + broken("Stream")], ["iterable dataset", "map-style"]),
    "a dataset with dice of its own": (["data.factory=" + broken("Fickle")], ["read twice"]),
    "an optimizer that does not exist": (["train.optimizer=Adan"], ["train.optimizer", "AdamW"]),
    "an optimizer that cannot be": (["train.optimizer=LBFGS"], ["LBFGS", "refused"]),
    "arguments the optimizer has not": (["train.optimizer_args={ beta = 1 }"], ["optimizer_args", "beta"]),
    "a schedule that cannot be": (["train.schedule=ReduceLROnPlateau"], ["refused", "function of the step"]),
    "SyncBatchNorm": (["model.factory=" + broken("synchronised")], ["SyncBatchNorm"]),
    "sparse gradients": (["model.factory=" + broken("SparseWords")], ["sparse"]),
    "a collective in forward": (["model.factory=" + broken("Talks")], ["collective", "allreduce"]),
    "a state outside of buffers": (["model.factory=" + broken("Stateful")], ["computed again", "state"]),
    "dice of the model's own": (["model.factory=" + broken("OwnDice")], ["computed again", "random"]),
    "a buffer that is replaced": (["model.factory=" + broken("Replaces")], ["buffer mean"]),
    "a loss that is a mean": (["train.loss=" + broken("mean_loss")], ["mean_loss", "reduction"]),
    "a parameter that is not used, where all must be": (
        ["model.factory=" + broken("Never"), "model.find_unused=false"],
        ["rare.bias takes no part", "find_unused"],
    ),
}


@pytest.mark.parametrize("name", REFUSED_BY_A_RANK)
def test_what_a_rank_refuses(job, tmp_path, name):
    """In a team of one, in this process: the rank's own words are what the command prints."""
    settings, words = REFUSED_BY_A_RANK[name]
    loaded = load_job(job, dict(setting.split("=", 1) for setting in settings), ranks=1)
    RunFolder(tmp_path / "run").create()
    with pytest.raises(DureError) as caught:
        run_rank(loaded.to_json(), str(tmp_path / "run"))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_ranks_refusal_is_one_line_of_the_command(job, tmp_path):
    ended = train(job, tmp_path / "run", "--set", "model.factory=" + broken("raising_model"))
    fails(ended, 2, "model.factory", "RuntimeError: no model today")


def test_weights_by_the_clock_are_refused(job, tmp_path):
    ended = train(job, tmp_path / "run", "--set", "model.factory=" + broken("by_the_clock"))
    fails(ended, 2, "other weights on rank(s) 1")


def test_a_loss_that_is_not_a_number_names_step_rank_and_shard(job, tmp_path):
    ended = train(job, tmp_path / "run", "--set", "model.factory=" + broken("NotANumber"))
    fails(ended, 1, "the loss is nan at step 0, in shard 5 (rank 1)")


def test_a_rank_that_raises_is_the_cause_with_its_own_traceback(job, tmp_path):
    ended = train(
        job, tmp_path / "run", "--set", "model.factory=" + broken("act"), "--set", "model.args.do=raise"
    )
    fails(ended, 1, "rank 1", "ValueError: sample 13 is unlucky")
    assert "in raising" in ended.err
    assert "all ranks start again" not in ended.err  # what the job does wrong it would do again
    assert "PeerLost" not in ended.err


def test_a_rank_that_is_killed_is_named(job, tmp_path):
    ended = train(
        job, tmp_path / "run", "--set", "model.factory=" + broken("act"), "--set", "model.args.do=kill"
    )
    fails(ended, 1, "rank 1", "SIGKILL", "started again 3 times and came no further than step 0")


def test_what_users_see_is_korean_and_logs_and_files_stay_english(job, tmp_path):
    ended = train(
        job,
        tmp_path / "run",
        *("--set", "model.factory=" + broken("act"), "--set", "model.args.do=kill"),
        *("--set", "team.max_restarts=1", "--lang", "ko"),
    )
    fails(ended, 1, "의 랭크 1이 SIGKILL에 의해 강제 종료되었습니다: 메모리 부족이거나")
    assert "팀을 한 번 다시 시작했지만 스텝 0을 넘지 못했습니다." in ended.err
    assert "모든 랭크를 다시 시작합니다 (진전 없는 재시작 1번 중 1번째): " in ended.err
    assert "was killed" not in ended.err
    kept = [
        path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*.[jl]*") if path.is_file()
    ]
    assert kept
    assert not re.search("[가-힣]", "".join(kept))


@pytest.mark.soak
def test_ranks_that_wait_too_long_leave_their_stacks(job, tmp_path):
    settings = [
        "model.factory=" + broken("act"),
        "model.args.do=sleep",
        "team.hang_seconds=3",
        "team.max_restarts=1",
    ]
    ended = train(job, tmp_path / "run", *(part for s in settings for part in ("--set", s)))
    fails(ended, 1, "rank 1", "step 0", "stacks")
    stacks = {path.name: path.read_text() for path in (tmp_path / "run" / "stacks").iterdir()}
    assert sorted(stacks) == ["rank-0.txt", "rank-1.txt"]
    assert "asleep" in stacks["rank-1.txt"]
    assert "backward" in stacks["rank-0.txt"]


def test_a_port_in_use(job, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fails(train(job, tmp_path / "run", "--port", port), 2, str(port))


def test_a_run_folder_is_left_alone_and_events_that_cannot_be_written_do_not_stop_training(job, tmp_path):
    """A taken folder from which nothing can go on, for nothing is saved there; beside it a run that goes wrong."""
    nothing = ("--set", "checkpoint.every_seconds=0")
    whole = train(job, tmp_path / "whole", *nothing).summary
    before = (tmp_path / "whole" / "summary.json").read_bytes()
    fails(train(job, tmp_path / "whole", *nothing), 2, "holds a run already")
    assert (tmp_path / "whole" / "summary.json").read_bytes() == before

    (tmp_path / "run" / "events" / "rank-1.jsonl").mkdir(parents=True)  # not a file to write into
    summary = train(job, tmp_path / "run").summary
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert whole["completely_recorded"] is True
    assert summary["completely_recorded"] is False
    assert any("incompletely recorded" in note for note in summary["notes"])


@pytest.mark.soak
def test_a_batch_smaller_than_the_shards_works_and_says_so(job, tmp_path):
    summary = train(job, tmp_path / "run", "--set", "data.global_batch=3").summary
    assert summary["ledger"]["exactly_once"] is True
    assert any("5 of 8 shards have no samples" in note for note in summary["notes"])


def test_paths_that_are_not_utf8_are_paths_like_others(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    shutil.copy(FOLDER / "broken.py", folder)
    (folder / "job.toml").write_text(JOB.replace("{here}/", ""))
    ended = train(folder / "job.toml", folder / "run")
    assert ended.summary["ledger"]["exactly_once"] is True
    again = train(folder / "job.toml", folder / "run").summary
    assert again["resumed_from"] == 8
    assert again["run"] == str(folder / "run")


def test_an_unknown_command_or_option_is_a_usage_error():
    for arguments in (["fly"], ["train"], ["train", "x.toml", "--rnaks", "3"]):
        ended = dure(*arguments)
        assert ended.code == 2
        assert "Error" in ended.err
