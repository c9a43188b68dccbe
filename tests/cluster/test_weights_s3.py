"""Pretrained weights in a bucket: opened with few small requests, and the same bits as transformers has them."""

from __future__ import annotations

import io
import uuid

import pytest
import torch
from support.pretrained import bert_folder, loaded, read

from dure.storage import open_store
from dure.weights.source import open_source


@pytest.fixture
def location(s3) -> str:
    return s3.make_bucket(f"dure-weights-{uuid.uuid4().hex[:12]}") + "/models/some"


@pytest.mark.soak
def test_a_pretrained_bert_in_a_bucket_is_the_bits_that_from_pretrained_gives(location: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    bucket = open_store(location)
    for name in ("config.json", "model.safetensors"):
        bucket.write_whole(name, [(bert_folder() / name).read_bytes()])
    opening = open_store(location, read_only=True)
    source = open_source(opening, "")
    used = opening.access.as_dict()
    assert used["read_requests"] <= 5  # names, then size and content of the header and of the config
    assert used["read_bytes"] < 64 * 1024
    assert source.kind == "huggingface"
    ours, found = loaded(location)
    theirs = transformers.AutoModel.from_pretrained(bert_folder())
    assert found.missing == found.unexpected == ()
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())


def test_a_pth_in_a_bucket_is_opened_without_reading_its_tensors(location: str) -> None:
    torch.manual_seed(0)
    state = {f"layer.{number}": torch.randn(100, 1000) for number in range(5)}
    file = io.BytesIO()
    torch.save(state, file)
    store = open_store(location)
    store.write_whole("w.pth", [file.getvalue()])
    source = open_source(store, "w.pth")
    assert store.access.as_dict()["read_bytes"] < 100_000
    assert {at.name for at in source.tensors} == state.keys()
    assert all(torch.equal(read(store, at), state[at.name]) for at in source.tensors)
