"""Saving takes no more memory the hundredth time than the tenth; the bench measures what it says."""

import pytest
from support.commands import dure

from dure.tools.bench.checkpoint import LOOKS, memory_after_saves

MIB = 1 << 20


def test_memory_is_flat_over_100_saves(tmp_path):
    ranks = 2
    early, late = memory_after_saves(tmp_path, ranks, LOOKS)
    assert (early["saves"], late["saves"]) == (10, 100)
    assert late["states_bytes"] == early["states_bytes"] > MIB
    assert late["shared_maps"] == early["shared_maps"]
    # A share of the state is 7 MiB: one that was left behind at every save would be 600 MiB by now.
    assert late["ranks_bytes"] - early["ranks_bytes"] < ranks * 8 * MIB
    assert len(list((tmp_path / "often").glob("step-*"))) == 1


@pytest.mark.soak
def test_the_bench_has_all_its_figures():
    figures = dure("bench", "checkpoint", "--quick", "--json", deadline_seconds=500).summary
    runs, stalls, saves = figures["runs"], figures["stalls"], figures["saves"]
    assert runs["checkpoints"][0] >= 2
    assert runs["ratio"] > 0
    assert runs["second_half_ratio"] > 0
    assert min(stalls["ratios"].values()) > 0
    assert set(saves) == {"state_bytes", "disk", "disk_past_cache", "dure", "torch_save", "dcp", "dcp_async"}
    assert all(saves[name]["mb_per_second"] > 0 for name in saves if name != "state_bytes")
    assert saves["dure"]["waited_seconds"] < saves["dure"]["seconds"]
    assert [look["saves"] for look in figures["memory"]] == [10, 100]
