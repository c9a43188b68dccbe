"""Whatever a model does, its weights are the same bits on every number of ranks."""

import pytest
from support import features

from dure.base.run_folder import RunFolder
from dure.launch import run_team

NAMES = tuple(sorted(set(features.FEATURES) - {"compiled"}))


def train_on(ranks, names, folder, audit=0.0):
    return run_team(
        "support.features:train_all", (names, audit), ranks=ranks, folder=RunFolder(folder), hang_seconds=300
    )


@pytest.fixture(scope="module")
def alone():
    """Every feature on one rank, in this process."""
    return features.train_all(NAMES)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory):
    """In half of the steps another rank computes a shard again, which changes nothing."""
    return train_on(3, NAMES, tmp_path_factory.mktemp("features-3"), 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_on_1_and_3_ranks(alone, on_three, name):
    assert [result[name] for result in on_three] == [alone[name]] * 3


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_the_same_bits_on_2_5_and_8_ranks(alone, ranks, tmp_path):
    assert train_on(ranks, NAMES, tmp_path) == [alone] * ranks


def test_features_differ_from_each_other(alone):
    """A feature that had no effect would prove nothing."""
    results = {name: sha for name, (sha, _) in alone.items()}
    assert results.pop("loader workers") == results["plain"]
    assert len(set(results.values())) == len(results)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_compiled_model_has_the_same_bits_on_1_and_3_ranks(tmp_path):
    """With torch's own compiler, which takes a while."""
    found = [
        run_team(
            "support.features:train_all",
            (("compiled",),),
            ranks=ranks,
            folder=RunFolder(tmp_path / str(ranks)),
            hang_seconds=600,
        )
        for ranks in (1, 3)
    ]
    assert found[1] == [found[0][0]] * 3
