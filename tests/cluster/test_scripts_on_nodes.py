"""Stock scripts on two nodes of two ranks: the backend "dure" and `dure.attach` are right there too."""

import pytest
from support import attaching

from dure.base.run_folder import RunFolder
from dure.tools.bench.two_nodes import TwoNodes
from dure.tools.lab import why_not_here

REASON = why_not_here()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"two nodes: {REASON}")


@pytest.fixture(scope="module")
def nodes():
    with TwoNodes() as made:
        yield made


def test_attached_models_are_the_same_bits_on_ranks_of_two_nodes_and_plain_ddp_to_rounding(nodes, tmp_path):
    folder = RunFolder(tmp_path / "run")
    found = nodes.run_ranks("support.attaching:cases", (), ranks_per_node=2, folder=folder)
    for case in attaching.CASES:
        hashes, away = found[0][case]
        assert hashes[0] == hashes[1] != hashes[2], case
        assert all(rank[case][0] == hashes for rank in found), case
        assert away < (2e-2 if case == "mixed dtypes" else 1e-5), case
    for rank in found:
        told, _ = rank["a rank that wrote to its weights"]
        assert "after step 4 rank(s) 1 hold other bits of 2.weight than the other ranks" in told


def test_torchs_own_loops_on_the_backend_are_the_same_bits_on_two_nodes_and_gloos_to_rounding(
    nodes, tmp_path
):
    folder = RunFolder(tmp_path / "run")
    args = (str(tmp_path / "checkpoints"),)
    found = nodes.run_ranks("support.backend_loops:torch_loops", args, ranks_per_node=2, folder=folder)
    for name, (first, again, gloo) in found[0].items():
        assert first == again, name
        assert {rank[name][0][1] for rank in found} == {first[1]}, name
        assert first[0] == pytest.approx(gloo[0], rel=1e-4), name
