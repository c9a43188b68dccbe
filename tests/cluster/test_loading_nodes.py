"""Weights on two nodes, and from a bucket: read once over all, sent once per node, the same bits."""

import pytest
from support import loads, pretrained

from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.storage import open_store
from dure.tools.bench.load import bench_load
from dure.tools.bench.two_nodes import TwoNodes
from dure.tools.lab import why_not_here

pytest.importorskip("safetensors")


@pytest.mark.skipif(why_not_here() is not None, reason=f"no two nodes here: {why_not_here()}")
def test_two_nodes_read_a_file_once_and_send_each_other_half_of_it(tmp_path):
    loads.write_weights(tmp_path)
    size = (tmp_path / "w.safetensors").stat().st_size
    with TwoNodes() as nodes:
        found = nodes.run_ranks(
            "support.loads:load_between_nodes",
            (str(tmp_path),),
            ranks_per_node=2,
            folder=RunFolder(tmp_path / "run"),
        )
    for how in loads.WAYS:
        assert [rank[how][0] for rank in found] == [[]] * 4
        assert len({rank[how][1] for rank in found}) == 1
    read = [rank["slices"][2] for rank in found]
    assert sum(read) <= 1.01 * size
    assert min(read) > 0.1 * size
    # Each node lacks the half that the other has read: one file's size over the wire for both nodes together.
    sent = [found[leader]["slices"][3] for leader in (0, 2)]
    assert all(0.35 * size < there < 0.65 * size for there in sent), (sent, size)
    assert 0.95 * size < sum(sent) < 1.1 * size
    # With one reader, the other node gets all of it, once, and not once per rank.
    assert 0.95 * size < found[0]["rank0"][3] < 1.15 * size
    assert found[2]["rank0"][3] < 0.1 * size


@pytest.mark.skipif(why_not_here() is not None, reason=f"no two nodes here: {why_not_here()}")
def test_trouble_on_one_node_is_raised_on_both(tmp_path):
    loads.write_weights(tmp_path)
    whole = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "garbage.safetensors").write_bytes(b"\xff" * 4096)
    (tmp_path / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    with TwoNodes() as nodes:
        found = nodes.run_ranks(
            "support.loads:fail_in_many_ways",
            (str(tmp_path),),
            ranks_per_node=2,
            folder=RunFolder(tmp_path / "run"),
        )
    for rank in found:
        faults = {name: error for name, error in rank.items() if name not in ("afterwards", "another model")}
        assert all(
            kind != "none" and words.startswith("rank ") and seconds < 50
            for kind, words, seconds in faults.values()
        ), faults
        assert "rank 3: w.safetensors: the disk" in faults["disk error, slices"][1]
        assert rank["afterwards"][0] == "none"


def test_a_pretrained_bert_is_transformers_own_from_a_folder_and_from_a_bucket(s3, tmp_path):
    pytest.importorskip("transformers")
    folder = pretrained.bert_folder()
    location = s3.make_bucket("dure-bert")
    store = open_store(location)
    for name in ("config.json", "model.safetensors"):
        store.write_whole(f"bert/{name}", [(folder / name).read_bytes()])
    found = run_team(
        "support.loads:load_bert",
        (str(folder), location),
        ranks=4,
        folder=RunFolder(tmp_path),
        hang_seconds=300,
    )
    assert [wrong for rank in found for wrong, _, _ in rank] == [[]] * 8
    # With a head that no file has: the same from both storages, on all ranks.
    assert len({tuple(headed) for rank in found for _, *headed in rank}) == 1


def test_the_server_itself_counts_one_file(s3_running):
    figures = bench_load(ranks=4, mb=20, storage="s3", rounds=1, contenders=("slices",))
    size = figures["file_bytes"]
    for row in figures["results"]:
        assert row["server_bytes"] == row["storage_bytes"]
        assert row["server_requests"] == row["storage_requests"]
        assert 0.99 * size < row["server_bytes"] <= 1.01 * size
