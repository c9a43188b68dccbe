"""The ranks of `dure bench load`: one load after the other, contender by contender, round by round."""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dure
from dure.base.errors import ReplicasDiffer
from dure.comm.topology import read_topology
from dure.observe.heartbeat import Phase
from dure.storage import Store, open_store
from dure.team import Team
from dure.tools.bench.load import FLOOR, OURS, WEIGHTS, RankFigures, Task, config_json
from dure.tools.bench.throttled import ThrottledStore
from dure.weights.filling import fingerprint_of_tensors
from dure.weights.load import How, load
from dure.weights.load_group import LoadContext


@dataclass(frozen=True)
class Held:
    """What a contender has in the end."""

    tensors: dict[str, torch.Tensor]
    stages: dict[str, float]
    requests: int | None = None
    read_bytes: int | None = None
    keep: Sequence[object] = ()


Contender = Callable[[], Held]
Counts = tuple[int | None, int | None]
"""Requests and bytes; None where the file is mapped, so that nobody can count."""


class Encoder(nn.Module):
    """BERT's layers under BERT's names, so that transformers can load the same file; it need not compute."""

    def __init__(self, hidden: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(vocabulary, hidden),
                "position_embeddings": nn.Embedding(512, hidden),
                "token_type_embeddings": nn.Embedding(2, hidden),
                "LayerNorm": nn.LayerNorm(hidden),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_layer(hidden) for _ in range(layers))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(hidden, hidden)})


def _layer(hidden: int) -> nn.ModuleDict:
    def dense(inner: int, outer: int) -> nn.ModuleDict:
        return nn.ModuleDict({"dense": nn.Linear(inner, outer), "LayerNorm": nn.LayerNorm(outer)})

    own = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")})
    return nn.ModuleDict(
        {
            "attention": nn.ModuleDict({"self": own, "output": dense(hidden, hidden)}),
            "intermediate": nn.ModuleDict({"dense": nn.Linear(hidden, 4 * hidden)}),
            "output": dense(4 * hidden, hidden),
        }
    )


def sizes_for(mb: float) -> dict[str, int]:
    """An encoder of about so many MB: whole layers, the rest in the vocabulary."""
    hidden = 768 if mb >= 100 else 128
    floats = int(mb * 1e6 / 4)
    layer = 12 * hidden * hidden + 13 * hidden
    fixed = 514 * hidden + 2 * hidden + hidden * hidden + hidden
    layers = max(1, int((floats - fixed) * 0.8 / layer))
    return {
        "hidden": hidden,
        "layers": layers,
        "vocabulary": max(64, (floats - fixed - layers * layer) // hidden),
    }


def write_model(folder: Path, mb: float) -> int:
    """A folder as Hugging Face lays it out; returns the size of the weights' file."""
    sizes = sizes_for(mb)
    folder.mkdir()
    torch.manual_seed(42)
    from safetensors.torch import save_file

    save_file(Encoder(**sizes).state_dict(), str(folder / WEIGHTS), metadata={"format": "pt"})
    settings = {
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["hidden"] // 64,
        "intermediate_size": 4 * sizes["hidden"],
        "vocab_size": sizes["vocabulary"],
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    }
    (folder / "config.json").write_text(config_json(settings))
    return (folder / WEIGHTS).stat().st_size


def measure(task: Task) -> dict[str, RankFigures]:
    """Entry point of a rank: every contender in turn, a warm-up round first."""
    if "hf" in task.contenders:
        importlib.import_module(
            "transformers.models.bert.modeling_bert"
        )  # importing it is nobody's loading time
    with dure.start(shards=read_topology(os.environ).size) as team:
        contenders = {name: _contender(name, task, team) for name in task.contenders}
        nbytes = sum(p.nbytes for p in _on_meta(task.mb).parameters())
        every: dict[str, Contender] = {FLOOR: partial(_floor, nbytes), **contenders}
        figures = {name: RankFigures() for name in every}
        for turn in range(task.rounds + 1):
            # Nobody always comes after the same one: what that one left behind is not the same for all.
            order = [*every][turn % len(every) :] + [*every][: turn % len(every)]
            for name in order:
                team.heartbeat.beat(turn, Phase.LOADING)
                keeps = turn > 0 or task.rounds == 0
                _time_one(every[name], team, figures[name] if keeps else RankFigures(), nbytes, name != FLOOR)
        return figures


def _time_one(contender: Contender, team: Team, figures: RankFigures, nbytes: int, compare: bool) -> None:
    gc.collect()
    _malloc_trim(0)  # so that nobody gets memory that another has touched already
    # Peak memory counts from here. Ranks that are behind must not disturb the next.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    held = contender()
    mine = time.perf_counter() - began
    peak = _status("VmHWM") - before - nbytes
    dist.barrier()
    figures.seconds.append(mine)
    figures.stages.append(held.stages)
    figures.requests.append(held.requests)
    figures.read_bytes.append(held.read_bytes)
    figures.peak_extra_bytes.append(max(0, peak))
    if compare:
        found = fingerprint_of_tensors(held.tensors.items())
        if len(set(team.group.gather(found, "comparing loaded weights"))) > 1:
            raise ReplicasDiffer("ranks hold different weights after loading the same file")
        figures.fingerprints.append(found)


def _contender(name: str, task: Task, team: Team) -> Contender:
    if name in OURS:
        context = LoadContext(team.group, team.topology, 60.0)
        return partial(_ours, cast(How, name), task, context, with_broadcast=name == "every-rank")
    return partial({"load_file": _load_file, "hf": _from_pretrained}[name], task)


def _ours(how: How, task: Task, context: LoadContext, *, with_broadcast: bool) -> Held:
    def opened() -> Store:
        store = open_store(task.location, read_only=True)
        if task.throttle is None:
            return store
        return cast(Store, ThrottledStore(store, Path(task.folder) / "rate", task.throttle * 1e6))

    loaded = load(partial(Encoder, **sizes_for(task.mb)), opened, f"model/{WEIGHTS}", context, how=how)
    stages = dict(loaded.seconds)
    keep: list[object] = []
    if with_broadcast:  # as the documents draw it: every rank has read everything, and DDP sends it once more
        keep.append(_broadcast(loaded.module, stages))
    requests, read_bytes = (int(loaded.access[key]) for key in ("read_requests", "read_bytes"))
    return Held(dict(loaded.module.named_parameters()), stages, requests, read_bytes, keep)


def _load_file(task: Task) -> Held:
    """As people write it: build the model, load the file, load_state_dict, wrap."""
    from safetensors import torch as safetensors_torch

    stages: dict[str, float] = {}
    began = time.perf_counter()
    module = Encoder(**sizes_for(task.mb))
    stages["build"] = time.perf_counter() - began
    began = time.perf_counter()
    counts: Counts = (None, None)
    if "://" in task.location:
        store = open_store(task.location, read_only=True)
        path = f"model/{WEIGHTS}"
        state = safetensors_torch.load(store.read(path, 0, store.size(path)))
        counts = store.access.read_requests, store.access.read_bytes
    else:
        state = safetensors_torch.load_file(Path(task.location) / "model" / WEIGHTS)
    module.load_state_dict(state)
    stages["read"] = time.perf_counter() - began
    return Held(dict(module.named_parameters()), stages, *counts, [_broadcast(module, stages)])


def _from_pretrained(task: Task) -> Held:
    transformers = importlib.import_module("transformers")
    stages: dict[str, float] = {}
    began = time.perf_counter()
    folder = Path(task.location) / "model"
    counts: Counts = (None, None)
    if "://" in task.location:
        folder, counts = _downloaded(task)
    module: nn.Module = transformers.AutoModel.from_pretrained(folder)
    stages["read"] = time.perf_counter() - began
    return Held(dict(module.named_parameters()), stages, *counts, [_broadcast(module, stages)])


def _downloaded(task: Task) -> tuple[Path, Counts]:
    """from_pretrained wants files, so every rank fetches its own, as it would from a hub."""
    store = open_store(task.location, read_only=True)
    folder = Path(task.folder) / f"download-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    for name in store.names("model"):
        path = f"model/{name}"
        (folder / name).write_bytes(store.read(path, 0, store.size(path)))
    return folder, (store.access.read_requests, store.access.read_bytes)


def _broadcast(module: nn.Module, stages: dict[str, float]) -> DistributedDataParallel:
    """DDP's own way to make replicas equal: rank 0's weights to all."""
    began = time.perf_counter()
    model = DistributedDataParallel(module)
    stages["ddp_broadcast"] = time.perf_counter() - began
    return model


def _floor(nbytes: int) -> Held:
    """Memory for the parameters, private and fresh, and every byte of it written."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    numpy.frombuffer(memory, numpy.uint8).fill(1)
    return Held({}, {}, 0, 0, [memory])


def _on_meta(mb: float) -> nn.Module:
    with torch.device("meta"):
        return Encoder(**sizes_for(mb))


def _status(key: str) -> int:
    """A size of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {key}")


_malloc_trim: Any = ctypes.CDLL(None).malloc_trim
