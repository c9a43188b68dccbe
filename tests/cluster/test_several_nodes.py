"""More than two nodes: the bits of one rank, and on each wire no more than the shape of the tree asks for."""

import pytest

from dure.plan.links import Shape, most_pieces, sent_by_node
from dure.tools.bench.scale import train_on
from dure.tools.bench.scale_ranks import SHARDS
from dure.tools.lab import why_not_here

pytestmark = pytest.mark.skipif(why_not_here() is not None, reason=f"no nodes here: {why_not_here()}")

HEADERS = 1.06
"""TCP's and the link's, acknowledgements, and some small messages of the step."""


def trains_the_same_and_sends_as_little(nodes, ranks_per_node):
    (row,) = train_on([nodes], ranks_per_node)
    print(row)
    assert row["same_bits"]
    nbytes = row["ring"] * row["ranks"] / (2 * (row["ranks"] - 1))
    asked = sent_by_node(nbytes, Shape(nodes, ranks_per_node, most_pieces(SHARDS, nodes)), "slices")
    assert row["most_in_step"] <= HEADERS * asked
    if SHARDS % nodes == 0:
        assert row["most_in_step"] <= HEADERS * row["ring"], "a ring over all ranks sends no less"


def test_three_nodes_train_the_bits_of_one_rank():
    trains_the_same_and_sends_as_little(3, 1)


@pytest.mark.soak
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(4, 1), (4, 2), (8, 1), (8, 2)])
def test_four_and_eight_nodes_train_the_bits_of_one_rank(nodes, ranks_per_node):
    trains_the_same_and_sends_as_little(nodes, ranks_per_node)
