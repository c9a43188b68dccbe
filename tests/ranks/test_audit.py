"""Another rank computes a shard again: a bit flipped in a gradient before it met others is found and undone."""

import json
import math

import pytest
from support import corrupting
from support.commands import train

from dure.base.run_folder import RunFolder
from dure.data.shards import shards_of_rank
from dure.launch import run_team
from dure.observe.events import Proved, ShardAudited, read_events
from dure.step.shadow import chosen

STEPS = 40


def on_ranks(ranks, entry, *args, folder):
    return run_team(
        f"support.corrupting:{entry}", args, ranks=ranks, folder=RunFolder(folder), hang_seconds=300
    )


@pytest.mark.parametrize("ranks", [3, 2, 1])
def test_flipped_bits_are_found_named_and_undone(ranks, tmp_path):
    """The last rank's machine is wrong now and then, rank 0's always."""
    told = on_ranks(ranks, "undisturbed_and_repaired", STEPS, ranks, folder=tmp_path)
    wrong = ranks - 1
    for one in told:
        shas = {one[kind]["sha"] for kind in ("undisturbed", "repaired", "half", "all")}
        assert len(shas) == 1
        assert one["undisturbed"]["computed"] == 0
        assert 0 < one["half"]["computed"] < one["all"]["computed"] == STEPS
        assert not one["half"]["found"]
        assert not one["all"]["found"]
    flipped = told[wrong]["repaired"]["flipped"]
    assert len(flipped) > 4
    for one in told:
        found = one["repaired"]["found"]
        assert [entry[:3] for entry in found] == flipped
        assert {entry[3] for entry in found} == {wrong}
        # Of a rank that computes another's shard wrongly, the step itself is right.
        owned = shards_of_rank(wrong, ranks, corrupting.SHARDS)
        assert all(in_step == (shard in owned) for _, shard, _, _, in_step in found)
    for one in told:
        stopped = one["stopped"]  # once the step is done, computed again
        assert stopped["error"].startswith(f"rank {wrong} on ")
        assert (stopped["taken"], stopped["sha"]) == (6, one["as far"]["sha"])
    error = {one["broken"]["error"] for one in told}
    assert len(error) == 1
    words = error.pop()
    if ranks == 3:
        assert words.startswith("rank 0 on ")
        assert "computed again they are as wrong" in words
    if ranks == 2:
        assert "no majority says which is right" in words
    if ranks == 1:  # a machine that is always wrong agrees with itself
        assert words == ""


def check_rate(told, share):
    """Exactly those flips are found whose shard was looked at; and of all, as many as the share of shards says."""
    owned = shards_of_rank(1, 3, corrupting.SHARDS)
    expected = []
    own = seen = 0
    for step, shard, name in told[1]["flipped"]:
        asked = chosen(corrupting.SEED, share, step, 0, corrupting.SHARDS, 3, corrupting.SHARDS)
        looked_at = asked is not None and asked.shard == shard
        assert shard in owned or (looked_at and asked.by == 1)
        if looked_at:
            expected.append((step, shard, name, 1, shard in owned))
        own += shard in owned
        seen += looked_at and shard in owned
    assert all(one["found"] == expected for one in told)
    chance = share / corrupting.SHARDS
    assert abs(seen - own * chance) < 4 * math.sqrt(own * chance * (1 - chance))
    return own, seen


def test_as_many_flips_are_found_as_the_share_says(tmp_path):
    own, seen = check_rate(on_ranks(3, "at_a_rate", 60, 0.9, 0.5, folder=tmp_path), 0.9)
    assert own > 40
    assert seen > 0


@pytest.mark.soak
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_as_many_of_400_flips_are_found_as_the_share_says(share, tmp_path):
    own, _ = check_rate(on_ranks(3, "at_a_rate", 900, share, 0.25, folder=tmp_path), share)
    assert own >= 400


@pytest.fixture
def job(tmp_path):
    def written(how, audit=1.0, flips=1):
        return corrupting.put_job(tmp_path, how, audit, flips)

    return written


def events_of(run, rank, kind):
    return [event for event in read_events(RunFolder(run).events(rank)) if isinstance(event, kind)]


def test_a_job_saves_and_stops_or_goes_on_without_the_rank_with_the_same_bits(job, tmp_path):
    undisturbed = train(job("stop", 0.0, -1), tmp_path / "quiet").summary
    assert undisturbed["audited"] is None
    sha = undisturbed["weights_sha256"]
    proofs = [[one.step for one in events_of(tmp_path / "quiet", rank, Proved)] for rank in range(3)]
    assert proofs == [proofs[0]] * 3  # as often as costs little, and yet at the same steps
    assert proofs[0][0] == 0
    assert proofs[0][-1] == 23

    stopped = train(job("stop"), tmp_path / "stopped")
    assert (tmp_path / "checkpoints/flipped").exists()
    assert stopped.code == 3, stopped.err
    last = stopped.err.strip().splitlines()[-1]
    assert "rank 1 on " in last
    assert "computes wrongly" in last
    assert json.loads((tmp_path / "stopped/errors/rank-0.json").read_text())["rank"] == 1
    seen = [one for rank in range(3) for one in events_of(tmp_path / "stopped", rank, ShardAudited)]
    wrong = [one for one in seen if not one.agree]
    assert [(one.wrong, one.owner == 1 or one.tensor != "") for one in wrong] == [(1, True)]
    goes_on = train(tmp_path / "job.toml", tmp_path / "stopped").summary
    assert goes_on["resumed_from"] == wrong[0].step + 1
    assert goes_on["weights_sha256"] == sha
    assert goes_on["audited"] == 24 - goes_on["resumed_from"]

    sharded = "--set=train.shard_optimizer=true"
    without = train(job("exclude"), tmp_path / "without", "--ranks", "2:3", sharded)
    assert without.summary["weights_sha256"] == sha
    assert without.summary["ranks"] == 2
    assert "computes wrongly" in without.err
