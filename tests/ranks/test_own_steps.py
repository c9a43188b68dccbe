"""Steps as people write them have the same bits on every number of ranks, or are refused by name."""

import pytest
from support import own_steps

from dure.base.run_folder import RunFolder
from dure.launch import run_team

NAMES = tuple(own_steps.STEPS_OF_PEOPLE)


@pytest.fixture(scope="module")
def alone():
    return own_steps.train_all(NAMES)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("own-steps-3"))
    # In half of the steps another rank computes a shard again, which changes nothing.
    return run_team("support.own_steps:train_all", (NAMES, 0.5), ranks=3, folder=folder, hang_seconds=300)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_on_1_and_3_ranks(alone, on_three, name):
    # Not as JSON: what came over the wire from other processes are the same Python values.
    assert [result[name] for result in on_three] == [alone[name]] * 3


def test_a_function_over_the_whole_batch_gives_the_bits_of_a_loss_of_the_output(alone):
    assert alone["whole forward"] == alone["loss of output"]


def test_what_cannot_be_exact_is_refused_by_name():
    said = own_steps.refused()
    for name, words in {
        "mean": "forward mean returns one number",
        "backward": "calls backward() itself",
        "writes": "writes the parameter",
        "two losses": "one of them",
        "no loss": "one of them",
        "several models": "torch.nn.ModuleDict",
        "foreign parameter": "that no replica has",
        "lbfgs": "LBFGS evaluates the model several times",
        "plateau": "ReduceLROnPlateau steps by a metric",
        "no step": "give an object with a method `step`",
    }.items():
        assert words in said[name], (name, said[name])
