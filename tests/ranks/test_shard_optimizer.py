"""A sharded optimizer changes who does the work, never a bit of the result."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from support import sharding
from support.alone import train_alone
from support.commands import EXAMPLES, train

from dure.base.run_folder import RunFolder
from dure.launch import run_team


def team_of(ranks, entry, args, folder):
    return run_team(
        f"support.sharding:{entry}", args, ranks=ranks, folder=RunFolder(folder), hang_seconds=300
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every optimizer on one rank, in this process, and on 3. By number, rank, way and name."""
    names = tuple(sharding.OPTIMIZERS)
    on_three = team_of(3, "train_each", (names,), tmp_path_factory.mktemp("sharding"))
    return {1: [sharding.train_each(names)], 3: on_three}


@pytest.mark.parametrize("name", sharding.OPTIMIZERS)
def test_the_same_bits_with_and_without_sharding_on_1_and_3_ranks(trained, name):
    sha, norm, _, rates, _ = trained[1][0]["not sharded"][name]
    for ranks, results in trained.items():
        for way in results[0]:
            found = [rank[way][name] for rank in results if name in rank[way]]
            assert all((one[0], one[1], one[3]) == (sha, norm, rates) for one in found), (
                f"{ranks} ranks, {way}"
            )
            assert len({one[2] for one in found}) <= 1, "one fingerprint of all parts"


def test_optimizers_differ_from_each_other(trained):
    """An optimizer that had no effect would prove nothing."""
    shas = [found[0] for found in trained[1][0]["not sharded"].values()]
    assert len(set(shas)) == len(shas)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "SGD, Nesterov"])
@pytest.mark.parametrize("way", ["copied", "one memory"])
def test_each_rank_holds_its_share_of_the_state_alone(trained, name, way):
    whole = trained[1][0]["not sharded"][name][4]
    parts = [rank[way][name][4] for rank in trained[3]]
    assert max(parts) < 1.1 * whole / 3 + 2000
    assert sum(parts) == pytest.approx(whole, rel=0.01)


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """What else must not change a bit, and what is refused: one team for both, by rank."""
    return team_of(3, "variants_and_refusals", (), tmp_path_factory.mktemp("varied"))


def test_own_gradients_unused_weights_no_clipping_writes_in_between_and_gloo_change_nothing(varied):
    results = [variants for variants, _ in varied]
    shas = set()
    for name in results[0]:
        (without,) = {rank[name][0][:2] for rank in results}
        assert {rank[name][1][:2] for rank in results} == {without}, name
        shas.add(without[0])
    assert len(shas) == 5, (
        "no clipping with and without unused weights, clipping with both, and written weights"
    )


def test_what_cannot_be_sharded_is_refused_by_name(varied):
    told = varied[0][1]
    assert "Adafactor cannot be sharded: it keeps sums over whole rows" in told["Adafactor"]
    assert "Muon cannot be sharded: it makes whole matrices orthogonal" in told["Muon"]
    assert "LBFGS cannot be sharded: it needs all gradients at once" in told["LBFGS"]
    assert "SparseAdam cannot be sharded: it needs sparse gradients" in told["SparseAdam"]
    assert (
        "Mine cannot be sharded: it is not known to update every element by itself; use one" in told["Mine"]
    )
    assert "a parameter of shape (3,) that is not the model's" in told["foreign"]
    assert "something wrote to 1.weight outside of the update" in told["written"]
    assert "own_gradients: 0.bias is not in this optimizer" in told["some"]
    assert "takes no closure" in told["closure"]
    assert "moved to other memory after its optimizer was sharded" in told["moved"]


def test_a_job_has_the_same_bits_and_the_same_recipe_with_sharding(tmp_path):
    job = EXAMPLES / "tiny_transformer.toml"
    short = ("--set", "train.epochs=1", "--set", "train.prove_every=5", "--ranks", 4)
    plain = asdict(train_alone(job, tmp_path / "plain", {"train.epochs": "1"}))
    sharded = train(job, tmp_path / "sharded", *short, "--set", "train.shard_optimizer=true").summary
    for same in ("weights_sha256", "recipe", "loss", "steps"):
        assert sharded[same] == plain[same]
    assert len(set(sharded["fingerprints"])) == 1


def test_a_job_that_trains_apart_cannot_shard(tmp_path):
    settings = ("--set", "team.sync=false", "--set", "train.shard_optimizer=true")
    ended = train(EXAMPLES / "tiny_transformer.toml", tmp_path / "run", *settings)
    assert ended.code == 2
    assert "train.shard_optimizer is true, but with team.sync = false" in ended.err


@pytest.mark.soak
def test_a_rank_that_is_killed_in_the_update_is_named_by_the_others_within_seconds():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from support import sharding; sharding.die_in_update({rank}, 4, {port}, victim=2)",
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        assert ranks[2].wait(100) == -signal.SIGKILL
        died = time.monotonic()
        for rank in (0, 1, 3):
            _, told = ranks[rank].communicate(timeout=300)
            assert (
                f"rank {rank} lost rank 2 in the exchange of updated parameters: process {ranks[2].pid}"
                in told
            )
        assert time.monotonic() - died < 15
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
