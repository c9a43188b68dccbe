"""The parts of loading that need no ranks: windows, models without values, places, ways to a device."""

import json
import random
import sys

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dure.base.errors import DureError, PeerLost, StorageError, WeightsError
from dure.comm.group import Group
from dure.comm.raise_on_all import raise_on_all
from dure.storage.safetensors import TensorAt
from dure.weights.build import build, sketch
from dure.weights.devices import choose_way
from dure.weights.filling import Target, fill, fingerprint_of, fingerprint_of_tensors
from dure.weights.loader import place_of
from dure.weights.source import Source
from dure.weights.windows import STAGING_BYTES, cut, window_bytes_for

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@st.composite
def placed(draw):
    """Tensors in files, with gaps between them, and the files' bytes."""
    tensors, contents = [], {}
    for file in "ab"[: draw(st.integers(1, 2))]:
        at = draw(st.integers(0, 9))
        for number in range(draw(st.integers(0, 6))):
            dtype = draw(st.sampled_from(DTYPES))
            count = draw(st.integers(0, 300))
            nbytes = count * dtype.itemsize
            tensors.append(TensorAt(f"{file}{number}", dtype, (count,), file, at, nbytes))
            at += nbytes + draw(st.sampled_from((0, 0, 1, 8, 300_000)))
        contents[file] = random.Random(at).randbytes(at)
    return tensors, contents


@given(placed(), st.integers(8, 2000))
@settings(deadline=None, max_examples=300)
def test_windows_bring_every_byte_of_every_tensor_and_no_large_gap(found, window_bytes):
    tensors, contents = found
    windows = cut(tensors, window_bytes)
    targets = [Target(t.name, torch.zeros(t.shape, dtype=t.dtype), t) for t in tensors]
    for window in windows:
        assert 0 < window.nbytes <= window_bytes
        content = contents[window.file][window.start : window.start + window.nbytes]
        assert len(content) == window.nbytes
        fill(targets, window, numpy.frombuffer(content, numpy.uint8))
    for target in targets:
        at = target.source
        assert (
            bytes(target.tensor.view(torch.uint8).numpy())
            == contents[at.file][at.start : at.start + at.nbytes]
        )
    wanted = sum(t.nbytes for t in tensors)
    assert wanted <= sum(window.nbytes for window in windows) <= wanted + 8 * len(tensors)
    assert fingerprint_of(targets) == fingerprint_of_tensors((t.name, t.tensor) for t in targets)


@given(st.integers(1, 64), st.integers(0, 2**40))
def test_every_reader_has_room_for_a_window(readers, nbytes):
    size = window_bytes_for(readers, nbytes)
    assert size % 4096 == 0
    assert size * readers <= STAGING_BYTES
    assert min(nbytes, STAGING_BYTES) <= 2 * readers * size or size == 4 * 2**20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        self.first.bias.is_special = True
        self.first.bias.requires_grad_(False)
        self.held = [self.first.bias]
        self.register_buffer("drawn", torch.randn(2), persistent=False)


class NeedsValues(Net):
    def __init__(self):
        super().__init__()
        self.scale = self.first.weight.abs().max().item()


def source_of(*names):
    shapes = {name: tuple(tensor.shape) for name, tensor in NeedsValues().state_dict().items()}
    tensors, at = [], 0
    for name in names:
        nbytes = 4 * int(numpy.prod(shapes[name]))
        tensors.append(TensorAt(name, torch.float32, shapes[name], "w", at, nbytes))
        at += nbytes
    return Source("safetensors", (("w", at),), tuple(tensors))


def test_a_model_whose_file_has_all_gets_memory_without_values():
    drawn = sketch(Net)
    assert drawn.module.first.weight.is_meta
    assert not drawn.module.drawn.is_meta
    built = build(drawn, source_of("first.weight", "first.bias"), strict=True)
    module = built.module
    assert built.how == "built without drawing weights"
    assert module.tied.weight is module.first.weight
    assert module.held[0] is module.first.bias
    assert module.first.bias.is_special
    assert not module.first.bias.requires_grad
    assert [p.is_meta for p in module.parameters()] == [False, False]
    assert module.first.weight.data_ptr() % 64 == 0
    module.first(torch.ones(1, 3)).sum().backward()
    assert module.first.weight.grad is not None


@pytest.mark.parametrize(
    ("make", "names", "why"),
    [
        (Net, ["first.weight"], "first.bias is not in the file"),
        (NeedsValues, ["first.weight", "first.bias"], "its factory needs the values of parameters"),
    ],
)
def test_another_model_is_built_from_the_seed_as_if_nothing_had_been_tried(make, names, why):
    torch.manual_seed(3)
    wanted = make()
    torch.manual_seed(3)
    built = build(sketch(make), source_of(*names), strict=False)
    assert why in built.how
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(built.module.state_dict()[name], tensor)
    assert torch.equal(built.module.drawn, wanted.drawn)


@pytest.mark.parametrize(
    ("weights", "place"),
    [
        ("models/w.safetensors", ("/fsx/job", "models/w.safetensors")),
        ("/other/minilm", ("/other", "minilm")),
        ("s3://bucket/some/w.pth", ("s3://bucket/some", "w.pth")),
        ("s3://bucket/minilm/", ("s3://bucket", "minilm")),
        ("s3://bucket", ("s3://bucket", ".")),
    ],
)
def test_weights_may_lie_in_the_storage_or_anywhere(weights, place):
    assert place_of(weights, "/fsx/job") == place


def test_the_way_to_the_device_is_chosen_and_said(monkeypatch):
    def way(device="cuda", location="/fsx", sliceable=True, how="slices"):
        return choose_way(torch.device(device), location, sliceable=sliceable, how=how)

    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert not way("cpu").direct
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (way().direct, "kvikio is not installed" in way().why) == (False, True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert way().direct
    assert "not a file system" in way(location="s3://b/x").why
    assert "as a whole" in way(sliceable=False).why
    assert "rank0" in way(how="rank0").why
    assert not way("cpu").direct


class Told(Group):
    """Rank 0's group, with what the other ranks answer."""

    def __init__(self, *others):
        super().__init__(None, 0, 1 + len(others))
        self.others = others

    def gather(self, value, what):
        return [value, *map(json.dumps, self.others)]


def test_the_cause_is_raised_and_not_its_aftermath():
    def lose():
        raise PeerLost("another rank cannot go on")

    fine, gone = ["", "", "an answer"], ["StorageError", "w: gone", ""]
    with pytest.raises(StorageError, match=r"^rank 2: w: gone$"):
        raise_on_all(Told(fine, gone), "trying", lose)
    with pytest.raises(PeerLost, match=r"^rank 0: another"):
        raise_on_all(Told(fine), "trying", lose)
    with pytest.raises(DureError, match=r"^rank 1: KeyError: 'x'$"):
        raise_on_all(Told(["DureError", "KeyError: 'x'", ""]), "trying", lambda: "")
    assert raise_on_all(Told(fine), "trying", lambda: "mine") == ["mine", "an answer"]


def test_alone_an_error_is_itself():
    error = WeightsError("no")

    def fail():
        raise error

    with pytest.raises(WeightsError) as raised:
        raise_on_all(Group(None, 0, 1), "trying", fail)
    assert raised.value is error
