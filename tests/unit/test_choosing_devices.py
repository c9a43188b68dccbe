"""Which device each rank computes on, and that no other room speaks of devices."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dure
from dure.base.errors import UsageError
from dure.device.accelerator import CPU, Decision, Seen, backends_for, decide
from dure.device.exactness import exactness_words
from dure.device.hashing import digests
from dure.image.environment import passed
from dure.launch.failure import may_pass
from dure.weights.devices import Way, agree_on_way

SOURCE = Path(dure.__file__).parent
WORDS = re.compile(r"""\.cuda\b|["']nccl["']|\.type\s*[!=]=|is_cuda|["']cuda["']|torch\.xpu|\bnew_group\(""")
KNOWN = {
    "config/sections.py": 'DeviceName = Literal["auto", "cpu", "cuda"]',
    "comm/group.py": "made: dist.ProcessGroup = dist.new_group(",
}


def test_no_room_but_device_speaks_of_devices():
    """Nor makes process groups: each needs its backends and its deadline."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name.startswith(("device/", "tools/bench/", "plan/")):
            continue  # benches measure torch's own groups; plans describe machines, and have no torch
        for line in path.read_text().splitlines():
            if WORDS.search(line) and line.strip() != KNOWN.get(name):
                found.append(f"{name}: {line.strip()}")
    assert not found, "\n".join(found)


def test_the_list_of_device_words_finds_them():
    for line in ("x.cuda()", "if device.type == 'xpu'", 'new_group(backend="nccl")', "first.is_cuda"):
        assert WORDS.search(line), line


def seen(*counts, wanted="auto", kind="gpu", models=None, size=2):
    """Nodes of two ranks, with so many devices each."""
    return [
        Seen(
            wanted,
            f"node{node}",
            node,
            local,
            size,
            kind if count else "",
            (models or {}).get(node, ("M1",)) * count,
            tuple(f"{node}-{at}" for at in range(count)),
        )
        for node, count in enumerate(counts)
        for local in range(size)
    ]


def test_every_rank_gets_a_device_of_its_own():
    assert decide(seen(2, 4)) == Decision("gpu", (0, 1, 0, 1))
    assert Decision("xpu", (0, 1, 0, 1)).device(3) == torch.device("xpu", 1)


def test_without_any_accelerator_it_is_the_cpu_and_nothing_is_said():
    assert decide(seen(0, 0)) == Decision("cpu")
    assert decide(seen(0, 0)).device(1) == CPU


def test_devices_on_some_nodes_only_are_used_by_no_rank_and_that_is_said():
    """It was each rank's own choice once: ranks of one team on two kinds of devices, which waited for ever."""
    decision = decide(seen(2, 0))
    assert decision.kind == "cpu"
    assert decision.why == "node1 has no device of kind gpu (none)"


def test_fewer_devices_than_ranks_are_said():
    assert decide(seen(1, 1)).why == "node0 has 1 device(s) of kind gpu for 2 ranks"


def test_a_device_that_is_asked_for_and_missing_is_refused_on_all_ranks():
    with pytest.raises(UsageError, match="device is gpu, but node1 has no device of kind gpu"):
        decide(seen(2, 0, wanted="gpu"))
    with pytest.raises(UsageError, match="device is other, but node0 has no device of kind other"):
        decide(seen(2, 2, wanted="other"))


def test_ranks_that_are_bound_to_a_device_each_use_their_only_one():
    """As srun --gpus-per-task=1 does it: every rank sees one device, and calls it 0. Parts of a GPU too."""
    bound = [replace(one, models=("M1",), ids=(f"id-{rank}",)) for rank, one in enumerate(seen(2))]
    assert decide(bound) == Decision("gpu", (0, 0))


def test_ranks_that_see_the_same_only_device_do_not_share_it():
    both = [replace(one, models=("M1",), ids=("id",)) for one in seen(2)]
    assert decide(both).why == "node0 has 1 device(s) of kind gpu for 2 ranks"
    crossed = [replace(one, ids=("a", "b") if at == 0 else ("b", "a")) for at, one in enumerate(seen(2))]
    assert decide(crossed).why == "ranks 0 and 1 on node0 would share one device"


def test_devices_of_different_models_are_refused():
    with pytest.raises(UsageError, match="rank 0 on node0 has a M1 and rank 2 on node1 a M2"):
        decide(seen(2, 2, models={1: ("M2",)}))


def test_ranks_that_were_asked_for_different_devices_are_refused():
    mixed = seen(2)
    with pytest.raises(UsageError, match="'auto' on rank 0 and 'cpu' on rank 1"):
        decide([mixed[0], replace(mixed[1], wanted="cpu")])


def test_what_ranks_tell_each_other_survives_the_way():
    one = seen(2)[0]
    assert Seen.from_json(one.to_json()) == one
    decision = decide(seen(2, 2))
    assert Decision.from_json(decision.to_json()) == decision


def test_groups_of_a_device_take_tensors_of_the_host_too(monkeypatch):
    assert backends_for(CPU) == "gloo"
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "meta", "metal")
    assert backends_for(torch.device("meta")) == "cpu:gloo,meta:metal"


def test_the_cpu_recipe_has_no_words_of_devices():
    assert exactness_words(CPU) == {}


def test_digests_see_every_change():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    first = digests([values, values[:0]])
    for change in (values + 0, values.clone()):
        assert digests([change, values[:0]]) == first
    for at in (0, 1, 500, 999):
        flipped = values.clone()
        flipped.view(torch.int32)[at] ^= 1 << 31
        assert digests([flipped])[0] != first[0]
    swapped = values.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert digests([swapped])[0] != first[0]
    assert (
        digests([values.t().contiguous(), torch.zeros(3, dtype=torch.bfloat16), torch.tensor(True)])[0]
        == first[0]
    )
    large = torch.zeros((1 << 20) + 5)
    other = large.clone()
    other[-1] = 1
    moved = large.clone()
    moved[4] = 1
    assert len(set(digests([large, other, moved]))) == 3


def test_an_assertion_of_a_kernel_is_the_program_s_fault():
    asserted = type("AcceleratorError", (RuntimeError,), {})("CUDA error: device-side assert triggered")
    lost = type("AcceleratorError", (RuntimeError,), {})("CUDA error: unspecified launch failure")
    assert not may_pass(asserted)
    assert not may_pass(RuntimeError("HIP error: device-side assert triggered"))
    assert may_pass(lost)
    assert may_pass(RuntimeError("NCCL error: unhandled system error"))


def test_variables_of_drivers_and_network_plugins_pass_into_the_image():
    names = ("FI_PROVIDER", "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "HIP_VISIBLE_DEVICES", "NCCL_DEBUG")
    kept = passed({**dict.fromkeys(names, "1"), "SECRET": "x", "FIVE": "x"}, "digest")
    assert set(names) <= set(kept)
    assert not {"SECRET", "FIVE"} & set(kept)


def test_one_rank_without_the_straight_way_makes_all_go_the_other():
    class Told:
        size = 2

        def gather(self, own, _what):
            return [own, json.dumps({"direct": False, "why": "kvikio is not installed"})]

    assert agree_on_way(Way(True, "straight"), Told()) == Way(
        False, "kvikio is not installed (on rank 1, and all ranks go one way)"
    )
