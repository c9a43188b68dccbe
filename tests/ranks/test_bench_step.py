"""The step bench measures what it says, and only contenders that train the same."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from dure.base.errors import DureError, UsageError
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.team import start
from dure.tools.bench import contenders, step
from dure.tools.bench.rounds import check_first_step
from dure.tools.bench.workload import BUCKET_CAPS_MB, LIBRARIES, Workload

TINY = Workload(width=16, layers=1, heads=2, vocabulary=32, seq=4, global_batch=8, batches=2)
PEERS = {"ddp", "ddp_tuned", "accelerate", "fabric"}
OTHERS = {"dure_sharded", *PEERS}


def left_alone(module, load, data):
    """A contender that claims to be DDP and synchronises nothing."""
    return contenders.limit(module, load, data)


def faster_learner(module, load, data):
    """A contender whose ranks agree, and yet train something else than ours."""
    return contenders.ddp(module, load, [(tokens, following.roll(1)) for tokens, following in data])


def check_impostors(impostors):
    """In a rank: what the check that every contender goes through says to those that are not what they say."""
    told = {}
    with start(shards=2) as team, start(shards=8) as finer:
        for impostor in impostors:
            contenders.PEERS["ddp"] = globals()[impostor]
            found = contenders.make_contenders(["limit", "dure", "ddp"], TINY, team, finer)
            try:
                check_first_step(found, team)
            except DureError as refused:
                told[impostor] = str(refused)
    return told


def settings_of_the_tuned():
    """In a rank: what DDP says of its own."""
    with start(shards=2):
        made = []
        plain = contenders._plain
        contenders._plain = lambda module, model, *rest: made.append(model) or plain(module, model, *rest)
        load = replace(TINY, bucket_cap_mb=2.0)
        contenders.ddp_tuned(contenders.Transformer(load), load, [])
        (model,) = made
        return [model.gradient_as_bucket_view, model.static_graph, model.bucket_bytes_cap / 2**20]


@pytest.fixture(scope="module")
def figures():
    missing = [package for package in LIBRARIES.values() if not step.importlib.util.find_spec(package)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    # The ranks themselves raise unless weights agree between ranks and, after the first step, with dure's.
    return step.bench_step(sizes=[2], rounds=2, steps=1, load=TINY)


def test_every_contender_is_timed_side_by_side_and_set_against_the_limit(figures):
    assert figures["not_installed"] == []
    assert (figures["seq"], figures["global_batch"], figures["rounds"]) == (4, 8, 2)
    model = contenders.Transformer(TINY)
    assert figures["model_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    (result,) = figures["results"]
    assert (result["ranks"], result["shards"]) == (2, 2)
    assert set(result["contenders"]) == {"limit", "dure", *OTHERS}
    for measured in result["contenders"].values():
        assert measured["step_ms"] > 0
        assert measured["cpu_s"] > 0
        assert len(measured["round_ms"]) == 2
    base = result["contenders"]["limit"]["step_ms"]
    for name in ("dure", *OTHERS):
        added = result["contenders"][name]["step_ms"] - base
        assert result["sync_added_ms"][name] == pytest.approx(added, abs=0.011)
        assert result["missing_to_limit"][name] == pytest.approx(added / base, abs=1e-3)
        cpu = result["contenders"][name]["cpu_s"] - result["contenders"]["limit"]["cpu_s"]
        assert result["sync_added_cpu_s"][name] == pytest.approx(cpu, abs=1e-6)
    assert set(result["weights_off_dure"]) == OTHERS
    assert result["weights_off_dure"]["dure_sharded"] == 0.0
    assert json.loads(json.dumps(figures)) == figures


def test_ratios_are_to_ddp_as_an_expert_sets_it_up_with_their_bars(figures):
    (result,) = figures["results"]
    caps = {float(cap): ms for cap, ms in result["bucket_caps_ms"].items()}
    assert set(caps) == set(BUCKET_CAPS_MB)
    assert all(ms > 0 for ms in caps.values())
    added = result["sync_added_ms"]
    for name, part in result["sync_of_tuned"].items():
        right = added[name] / added["ddp_tuned"] if added["ddp_tuned"] > 0 else None
        assert part == (right if right is None else pytest.approx(right, abs=1e-3))
    assert result["sync_of_tuned_bars"] == {"dure": 1 / 3}
    assert result["missing_to_limit_bars"] == {"dure_sharded": 0.0}
    words = step.in_words(figures)
    assert "(bar: ≤ 0.33 of ddp_tuned)" in words
    assert "(bar: ≤ 0% over the limit)" in words


def test_the_tuned_contender_is_set_up_as_it_says(tmp_path):
    told = run_team(
        "test_bench_step:settings_of_the_tuned", (), ranks=2, folder=RunFolder(tmp_path), hang_seconds=300
    )
    assert told == [[True, True, 2.0]] * 2


def test_the_price_of_exactness_is_measured_on_one_rank_too(figures):
    assert [(row["ranks"], row["shards"]) for row in figures["exactness"]] == [(1, 8), (2, 8)]
    for row in figures["exactness"]:
        assert row["price"] == pytest.approx(row["dure_ms"] / row["ddp_tuned_ms"] - 1, abs=1e-3)


def test_figures_are_told_in_words(figures):
    words = step.in_words(figures)
    for name in ("limit", "dure", *OTHERS, "price of exactness", "2 ranks, 2 shards"):
        assert name in words


def test_a_peer_that_is_not_installed_is_null_and_said(figures):
    (result,) = figures["results"]
    without = {**result, "contenders": {**result["contenders"], "fabric": None}}
    words = step.in_words({**figures, "not_installed": ["fabric"], "results": [without]})
    assert "fabric is not installed: pip install 'lightning-fabric'" in words


def test_a_contender_that_does_not_train_the_same_is_refused_on_every_rank(tmp_path):
    complaints = {"faster_learner": "they do not train the same", "left_alone": "ddp's replicas differ"}
    told = run_team(
        "test_bench_step:check_impostors",
        (list(complaints),),
        ranks=2,
        folder=RunFolder(tmp_path),
        hang_seconds=300,
    )
    assert len(told) == 2
    for of_rank in told:
        assert of_rank.keys() == complaints.keys()
        assert all(complaint in of_rank[impostor] for impostor, complaint in complaints.items()), of_rank


def test_a_library_that_does_not_wrap_the_model_in_ddp_is_refused():
    with pytest.raises(DureError, match="without DistributedDataParallel"):
        contenders._must_be_ddp("accelerate", nn.Linear(1, 1))


@pytest.mark.parametrize("sizes", [[1], [3], [16]])
def test_team_sizes_that_cannot_be_compared_are_refused(sizes):
    with pytest.raises(UsageError, match="use 2, 4, 8"):
        step.bench_step(sizes=sizes)


def test_the_bench_model_has_about_nine_million_parameters():
    with torch.device("meta"):
        model = contenders.Transformer(Workload())
    assert 8.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 9.5e6
