"""Weights from storage into the model of every rank; all ranks verify that they hold the same bits.

Three ways, the same bits. `slices`: every rank reads its part of every window. `rank0`: rank 0 reads all of it, and
the windows go round the same way. `every-rank`: what people write by hand, to compare with: each rank builds the
model from the seed, reads everything into memory, and copies it over.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy
import torch
from torch import nn

from dure.base.errors import DureError, ModelRefused, ReplicasDiffer
from dure.comm.raise_on_all import raise_on_all
from dure.device.accelerator import CPU
from dure.device.fingerprint import raw_bytes
from dure.storage import Store
from dure.storage.safetensors import TensorAt
from dure.weights.build import Built, Make, Sketch, build, sketch, sketch_of_folder
from dure.weights.devices import agree_on_way, choose_way, read_direct
from dure.weights.filling import Target, fill, fingerprint_of
from dure.weights.load_group import LoadContext, LoadGroup, fetch_pages, load_group_of
from dure.weights.pickled import load_pickled
from dure.weights.relay import ReadInto, Relay
from dure.weights.source import Source, open_source
from dure.weights.windows import cut, window_bytes_for

How = Literal["slices", "every-rank", "rank0"]
Progress = Callable[[int, int], None]
"""Bytes that this rank has, of all."""


@dataclass(frozen=True)
class Loaded:
    """A model with its weights, and what it took."""

    module: nn.Module
    how: How
    fingerprint: str
    """Of everything that was loaded, as it is in the model; the same on every rank and for every way."""
    nbytes: int
    """Bytes of the tensors that were loaded, as the files have them."""
    missing: tuple[str, ...]
    """Tensors of the model that the files do not have."""
    unexpected: tuple[str, ...]
    """Tensors of the files that the model does not have."""
    access: dict[str, int | float]
    """What this rank asked of the storage."""
    seconds: dict[str, float]
    """By stage: open, build, read (until the last window is copied), verify."""
    way: str
    """How the bytes came to the device, and why so."""
    built: str
    """How the model was built, and why so."""
    location: str
    """The storage that was read."""
    config: Mapping[str, Any] | None
    """A Hugging Face folder's config.json."""


@dataclass(frozen=True)
class FromConfig:
    """The model that a Hugging Face folder's own config.json describes."""

    arguments: Mapping[str, Any]
    """What `from_pretrained` takes; `auto` names the class."""


class _Ours:
    """What this rank has made so far; each stage adds to it."""

    store: Store
    sketch: Sketch
    built: Built
    load_group: LoadGroup


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def load(
    model: Make | nn.Module | FromConfig,
    opened: Callable[[], Store],
    path: str,
    context: LoadContext,
    *,
    how: How = "slices",
    strict: bool = True,
    progress: Progress | None = None,
    device: torch.device = CPU,
) -> Loaded:
    """Load what is at `path` into the model. A collective: any rank's trouble is raised on all of them.

    `opened` opens the storage, on every rank. `device` is where the model is to be; it may still be in host memory
    afterwards.
    """
    everyone, clock, ours = context.everyone, _Clock(), _Ours()

    def open_and_sketch() -> str:
        ours.store = opened()
        source = open_source(ours.store, path).to_json() if everyone.rank == 0 else ""
        if not isinstance(model, FromConfig):
            ours.sketch = sketch(model, for_real=how == "every-rank")
        return source

    def build_model() -> str:
        if isinstance(model, FromConfig):
            ours.sketch = sketch_of_folder(source, model.arguments)
        ours.built = build(ours.sketch, source, strict=strict)
        return json.dumps([name for _, name in ours.built.match.pairs])

    def read() -> str:
        if way.direct:
            targets = _targets(ours.built, [tensor for tensor, _ in ours.built.match.pairs])
            used = read_direct(targets, ours.store, context, device, progress)
            ours.store.access.read(used["bytes"], requests=used["requests"])
        else:
            targets = _read(ours, source, how, progress)
        return fingerprint_of(targets, device)

    with clock.stage("open"):
        source = Source.from_json(raise_on_all(everyone, "opening the weights", open_and_sketch)[0])
        own = choose_way(device, ours.store.location, sliceable=source.sliceable, how=how)
        way = agree_on_way(own, everyone)
    with clock.stage("build"):
        _refuse_other_models(
            [json.loads(text) for text in raise_on_all(everyone, "building the model", build_model)]
        )
        ours.load_group = load_group_of(context)
    with clock.stage("read"):
        try:
            found = raise_on_all(everyone, "loading weights", read)
        except DureError:
            # What was asked for and never sent would be taken for the next load's.
            context.groups.pop("between", None)
            raise
        finally:
            ours.load_group.close()
    built, store = ours.built, ours.store
    odd = [str(rank) for rank, other in enumerate(found) if other != found[0]]
    if odd:
        raise ReplicasDiffer(
            f"rank(s) {', '.join(odd)} loaded other bits from {store.location}: {path} than rank 0; was the file "
            "written meanwhile? If not, a machine's memory or network is at fault"
        )
    return Loaded(
        module=built.module,
        how=how,
        fingerprint=found[0],
        nbytes=sum(tensor.nbytes for tensor, _ in built.match.pairs),
        missing=built.match.missing,
        unexpected=built.match.unexpected,
        access=store.access.as_dict(),
        seconds=clock.seconds,
        way=way.why,
        built=built.how,
        location=store.location,
        config=source.config,
    )


def _read(ours: _Ours, source: Source, how: How, progress: Progress | None) -> list[Target]:
    """Fill the model's tensors."""
    built, store, load_group = ours.built, ours.store, ours.load_group
    tensors = [tensor for tensor, _ in built.match.pairs]
    readers = range(load_group.size) if how == "slices" else range(1)
    read_into: ReadInto = store.read_into
    if not source.sliceable:
        tensors = _one_after_the_other(tensors)
        readers = range(1)
        if load_group.rank == 0 or how == "every-rank":
            read_into = _from_memory(store, source, tensors)
    targets = _targets(built, tensors)
    if how == "every-rank":
        _read_everything(targets, read_into, progress)
        return targets
    window_bytes = window_bytes_for(len(readers), sum(tensor.nbytes for tensor in tensors))
    windows = cut(tensors, window_bytes)
    done, total = 0, sum(window.nbytes for window in windows)
    with Relay(load_group, windows, readers, read_into, window_bytes) as relay, torch.no_grad():
        fetch_pages(load_group)  # while the first window is read
        for window, held in relay.arrivals():
            fill(targets, window, held)
            done += window.nbytes
            if progress is not None:
                progress(done, total)
    return targets


def _targets(built: Built, tensors: list[TensorAt]) -> list[Target]:
    # A tied weight is known by its first name, whichever of them the file has.
    first = {id(tensor): name for name, tensor in reversed([*built.tensors.items()])}
    return [
        Target(first[id(built.tensors[name])], built.tensors[name], tensor, built.fresh)
        for tensor, (_, name) in zip(tensors, built.match.pairs, strict=True)
    ]


def _read_everything(targets: list[Target], read_into: ReadInto, progress: Progress | None) -> None:
    """All bytes of all files in memory at once, as `torch.load` has them; then each tensor from there."""
    windows = cut([target.source for target in targets], window_bytes=sys.maxsize)
    contents = []
    for window in windows:
        contents.append(bytearray(window.nbytes))
        read_into(window.file, window.start, memoryview(contents[-1]))
    done, total = 0, sum(window.nbytes for window in windows)
    with torch.no_grad():
        for window, content in zip(windows, contents, strict=True):
            fill(targets, window, numpy.frombuffer(content, numpy.uint8))
            done += window.nbytes
            if progress is not None:
                progress(done, total)


def _refuse_other_models(names: list[list[str]]) -> None:
    odd = [str(rank) for rank, other in enumerate(names) if other != names[0]]
    if odd:
        raise ModelRefused(
            f"rank(s) {', '.join(odd)} built another model than rank 0; build it from the run's seed and the same "
            "arguments alone (no clock, no process id, no rank)"
        )


def _one_after_the_other(tensors: list[TensorAt]) -> list[TensorAt]:
    """Places in a file that never was: the tensors' bytes without a gap."""
    placed, start = [], 0
    for tensor in tensors:
        placed.append(replace(tensor, start=start, file=""))
        start += tensor.nbytes
    return placed


def _from_memory(store: Store, source: Source, tensors: list[TensorAt]) -> ReadInto:
    """Reads of that file, from tensors that were read as a whole."""
    whole: dict[str, torch.Tensor] = {}
    for path, _ in source.files:
        whole |= load_pickled(store, path)

    def read_into(file: str, start: int, into: memoryview) -> None:
        stop = start + len(into)
        for tensor in tensors:
            first, end = max(start, tensor.start), min(stop, tensor.start + tensor.nbytes)
            if first < end:
                held = raw_bytes(whole[tensor.name])[first - tensor.start : end - tensor.start]
                into[first - start : end - start] = held

    return read_into
