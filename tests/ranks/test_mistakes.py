"""Silent mistakes of stock DDP scripts are named with their place; scripts without them hear nothing."""

import itertools
import json

import pytest
from support import FOLDER, mistakes
from support.commands import EXAMPLES, dure

from dure.base.run_folder import RunFolder
from dure.launch import run_team


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def troubles(folder):
    run = RunFolder(folder / "run")
    return run_team("support.mistakes:cases", (folder,), ranks=3, folder=run, hang_seconds=300)


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, cases in mistakes.MISTAKES.items() for case in cases]
)
def test_a_mistake_is_named_with_its_place(kind, case, troubles, folder):
    assert [rank[case.__name__] for rank in troubles] == [""] * 3
    told = mistakes.said(folder / case.__name__)
    assert [one["kind"] for one in told] == [kind]
    assert told[0]["place"].rpartition(":")[0].endswith("support/mistakes.py")


@pytest.mark.parametrize("case", mistakes.RIGHT)
def test_a_correct_loop_hears_nothing_and_is_watched_to_its_end(case, troubles, folder):
    assert [rank[case.__name__] for rank in troubles] == [""] * 3
    assert mistakes.said(folder / case.__name__) == []


def run_careless(folder, *words, watch="warn"):
    """The script twice, in one run folder: what it said each time, and the kinds of mistakes."""
    folder.mkdir()
    sessions = []
    for _ in range(2):
        own = ("--watch", watch, "--ranks", 2, "--run-dir", folder / "run")
        sessions.append(dure("run", *own, FOLDER / "careless.py", folder, *words))
    return sessions, [one["kind"] for one in mistakes.said(folder / "run")]


def test_a_script_under_dure_run_is_told_in_one_line_each_and_goes_on(tmp_path):
    (first, second), kinds = run_careless(tmp_path / "careless")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert sorted(kinds[:3]) == ["same-random-numbers", "set-epoch", "writers"]
    assert sorted(kinds[3:]) == ["resume", "same-random-numbers"]
    assert first.err.count("call sampler.set_epoch(epoch) before each epoch (at ") == 1
    assert first.out.count("is done") == 2
    assert (
        "in the middle of epoch 0, but reads it from its beginning: each rank's first 20 samples"
        in second.err
    )


def test_the_same_script_without_its_mistakes_hears_nothing_and_resumes_in_the_middle(tmp_path):
    (first, second), kinds = run_careless(tmp_path / "right", "right")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert kinds == []
    assert "dure: " not in first.err + second.err


@pytest.mark.soak
def test_a_mistake_is_an_error_if_asked_and_nothing_is_looked_for_if_not(tmp_path):
    (first, _), kinds = run_careless(tmp_path / "strict", watch="strict")
    assert first.code == 1
    assert "--watch warn goes on" in first.err
    assert kinds
    (first, second), kinds = run_careless(tmp_path / "off", watch="off")
    assert (first.code, second.code, kinds) == (0, 0, [])


SCRIPTS = {
    "with_torchrun": ["same-random-numbers"],
    "with_accelerate": ["same-random-numbers"],
    "from_torchrun": [],
    "from_accelerate": [],
}
"""Of examples/migrate, but with_fabric.py, which `fabric run` starts. Those that seed all ranks alike have dropout, and
so its mistake (transformers #37932)."""


@pytest.mark.soak
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_the_examples_hear_only_what_is_true(name, tmp_path):
    folder = tmp_path / "run"
    ran = dure("run", "--ranks", 2, "--run-dir", folder, EXAMPLES / "migrate" / f"{name}.py", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert [one["kind"] for one in mistakes.said(folder)] == SCRIPTS[name]


@pytest.mark.soak
@pytest.mark.parametrize("library", ["accelerate", "fabric", "trainer", "compiled"])
def test_loops_of_other_libraries_hear_only_what_is_true(library, tmp_path):
    folder = tmp_path / "run"
    ran = dure(
        "run",
        "--ranks",
        2,
        "--run-dir",
        folder,
        "-m",
        "support.backend_loops",
        library,
        "gloo",
        cwd=FOLDER.parent,
    )
    assert ran.code == 0, ran.err
    assert mistakes.said(folder) == []
    assert json.loads(ran.out.splitlines()[-1])


def test_in_a_team_the_mistakes_change_nothing(tmp_path):
    """Forgotten set_epoch, one seed everywhere, no_sync, padding, buffers, overlaps, writers: right by construction."""
    run = RunFolder(tmp_path / "run")
    ranks = run_team("support.by_construction:cases", (tmp_path,), ranks=3, folder=run, hang_seconds=300)
    assert len({rank["fingerprint"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["right"] == rank["careless"] == ranks[0]["right"]
        assert rank["evaluation"] == 22  # 22 samples for 3 ranks: none twice
        assert "seed of the sampler is 0 on rank 0 and 1 on rank 1" in rank["seeds"]
    orders = []
    for epoch in range(2):
        own = [[i for at, ids in rank["seen"] if at == epoch for i in ids] for rank in ranks]
        assert sorted(itertools.chain.from_iterable(own)) == list(range(24))
        orders.append(own)
    assert orders[0] != orders[1]
    assert [place.name for place in (tmp_path / "writers").iterdir()] == ["0"]
