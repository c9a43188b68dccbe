"""Two nodes have the bits of one rank: models, random reduces, a bf16 wire."""

import pytest
from support import features, sharding

from dure.base.run_folder import RunFolder
from dure.tools.bench.two_nodes import TwoNodes
from dure.tools.lab import why_not_here

pytestmark = pytest.mark.skipif(why_not_here() is not None, reason=f"no two nodes here: {why_not_here()}")

NAMES = (
    "dropout and batchnorm",
    "accumulation",
    "unused in some shards",
    "batch smaller than the shards",
    "bf16 weights",
)


@pytest.mark.soak
def test_models_on_two_nodes_have_the_bits_of_one_rank(tmp_path):
    alone = features.train_all(NAMES)
    assert set(NAMES) <= set(features.FEATURES)
    with TwoNodes() as nodes:
        folder = RunFolder(tmp_path / "nodes")
        found = nodes.run_ranks("support.features:train_all", (NAMES,), ranks_per_node=4, folder=folder)
    assert found == [alone] * 8


@pytest.mark.parametrize(
    ("wire", "ranks_per_node"), [pytest.param("fp32", 4, marks=pytest.mark.soak), ("bf16", 3)]
)
def test_random_reduces_between_two_nodes_are_the_plain_tree_sums_bits(wire, ranks_per_node, tmp_path):
    """With 3 ranks per node, nodes hold odd shares: several subtrees each."""
    with TwoNodes() as nodes:
        folder = RunFolder(tmp_path / "run")
        wrong = nodes.run_ranks(
            "support.reduces:trials", (25, 3, wire), ranks_per_node=ranks_per_node, folder=folder
        )
    assert wrong == [[]] * (2 * ranks_per_node)


def test_an_optimizer_sharded_within_each_node_has_the_bits_of_one_rank(tmp_path):
    alone = sharding.train_on_nodes("AdamW")
    with TwoNodes() as nodes:
        folder = RunFolder(tmp_path / "nodes")
        found = nodes.run_ranks(
            "support.sharding:train_on_nodes", ("AdamW",), ranks_per_node=2, folder=folder
        )
    assert found == [alone] * 4
    assert len(set(alone)) == 1
