"""Whatever a model does, its weights are the same bits on every number of ranks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import features

from dure.launch import run_team
from dure.run_folder import RunFolder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every feature on 1, 3 and 8 ranks: one team a number."""

    def on(ranks):
        folder = RunFolder(tmp_path_factory.mktemp(f"features-{ranks}"))
        names = tuple(sorted(set(features.FEATURES) - {"compiled"}))
        return run_team("features:train_all", (names,), ranks=ranks, folder=folder, hang_seconds=100)

    return {ranks: on(ranks) for ranks in (1, 3, 8)}


@pytest.mark.parametrize("name", sorted(set(features.FEATURES) - {"compiled"}))
@pytest.mark.timeout(300)
def test_the_same_bits_on_1_3_and_8_ranks(trained, name):
    one = trained[1][0][name]
    for ranks, results in trained.items():
        assert [result[name] for result in results] == [one] * ranks


def test_features_differ_from_each_other(trained):
    """A feature that had no effect would prove nothing."""
    results = {name: sha for name, (sha, _) in trained[1][0].items()}
    assert results.pop("loader workers") == results["plain"]
    assert len(set(results.values())) == len(results)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_compiled_model_has_the_same_bits_on_1_and_3_ranks(tmp_path):
    """With torch's own compiler, which takes a while."""
    found = [
        run_team(
            "features:train_all",
            (("compiled",),),
            ranks=ranks,
            folder=RunFolder(tmp_path / str(ranks)),
            hang_seconds=600,
        )
        for ranks in (1, 3)
    ]
    assert found[1] == [found[0][0]] * 3
