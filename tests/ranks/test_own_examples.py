"""The examples that are scripts: they run, from a copy of their folder, and have the same bits on 1 and 3 ranks."""

import shutil

import pytest
from support import own_examples
from support.commands import EXAMPLES, dure

from dure.base.run_folder import RunFolder
from dure.launch import run_team

pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """As people take them: the folder, copied somewhere else."""
    return shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("copied") / "examples", symlinks=True)


@pytest.fixture(scope="module")
def alone(copied):
    return own_examples.train_all(str(copied))


@pytest.fixture(scope="module")
def on_three(copied, tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("examples-3"))
    return run_team(
        "support.own_examples:train_all", (str(copied),), ranks=3, folder=folder, hang_seconds=300
    )


@pytest.mark.parametrize("name", own_examples.SCRIPTS)
def test_an_example_has_the_same_bits_on_1_and_3_ranks(alone, on_three, name):
    assert [result[name] for result in on_three] == [alone[name]] * 3


def test_every_script_among_the_examples_is_trained_here():
    scripts = {
        path.stem for path in EXAMPLES.glob("*.py") if "dure.start(" in path.read_text(encoding="utf-8")
    }
    assert scripts - {"ddp"} == set(own_examples.SCRIPTS)


def test_an_example_starts_as_its_first_lines_say(copied):
    ended = dure("run", "--ranks", 2, "reinforce.py", "--steps", 3, cwd=copied)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0].startswith("step 0: an episode wins")
    assert len({line.split(": ")[1] for line in lines if line.startswith("rank ")}) == 1


@pytest.mark.soak
def test_the_examples_learn():
    import dure as package

    with package.start(seed=1) as team:
        gan = own_examples.load(EXAMPLES, "gan")
        assert gan.train(team)[2] < 0.85 * gan.train(team, 1)[2]
        assert own_examples.load(EXAMPLES, "causal_lm").train(team)[1]["accuracy"] > 0.5
        first, last = own_examples.load(EXAMPLES, "reinforce").train(team)[1:]
        assert last > first + 1.0
