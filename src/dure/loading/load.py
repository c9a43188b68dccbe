"""Weights from storage into the model of every rank; all ranks verify that they hold the same bits.

Three ways, the same bits: `slices`, every rank reads its part of every window; `rank0`, rank 0 reads all of it;
`every-rank`, each rank reads everything for itself. They differ in who reads, and in nothing else.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from dure.errors import ReplicasDiffer
from dure.loading.build import Built, Make, build
from dure.loading.filling import Target, fill, fingerprint_of
from dure.loading.header import TensorAt
from dure.loading.pickled import load_pickled
from dure.loading.relay import Circle, ReadInto, Relay, alone, without_shared_memory
from dure.loading.source import Source, open_source
from dure.loading.together import together
from dure.loading.windows import Window, cut
from dure.fingerprint import raw_bytes
from dure.storage import Store

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
    notes: tuple[str, ...] = ()


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def load(
    make: Make | nn.Module | Callable[[Source], Make],
    opened: Callable[[], Store],
    path: str,
    circle: Circle,
    *,
    how: How = "slices",
    strict: bool = True,
    progress: Progress | None = None,
    from_source: bool = False,
) -> Loaded:
    """Load what is at `path` into the model. A collective: any rank's trouble is raised on all of them.

    `opened` opens the storage, on every rank. With `from_source`, `make` is told what the files hold first, and
    returns the factory.
    """
    clock = _Clock()
    everyone = circle.everyone
    with clock.stage("open"):
        stores: list[Store] = []

        def open_it() -> str:
            stores.append(opened())
            return open_source(stores[0], path).to_json() if everyone.rank == 0 else ""

        source = Source.from_json(together(everyone, "opening the weights", open_it)[0])
        store = stores[0]
    with clock.stage("build"):
        made: list[Built] = []

        def build_it() -> str:
            factory = make(source) if from_source else make  # type: ignore[call-arg, arg-type]
            made.append(build(factory, source, strict=strict))  # type: ignore[arg-type]
            return ""

        together(everyone, "building the model", build_it)
        built = made[0]
    with clock.stage("read"):
        targets: list[Target] = []

        def read_it() -> str:
            targets.extend(_read(built, source, store, circle, how, progress))
            return fingerprint_of(targets)

        found = together(everyone, "loading weights", read_it)
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
        notes=(built.how,),
    )


def _read(
    built: Built, source: Source, store: Store, circle: Circle, how: How, progress: Progress | None
) -> list[Target]:
    """Fill the model's tensors."""
    if how == "every-rank":
        circle = alone(circle.deadline_seconds)
    readers = range(circle.everyone.size) if how == "slices" else range(1)
    tensors = [tensor for tensor, _ in built.match.pairs]
    read_into: ReadInto = store.read_into
    if not source.sliceable:
        tensors = _one_after_the_other(tensors)
        readers = range(1)
        if circle.everyone.rank == 0:
            read_into = _from_memory(store, source, [tensor.name for tensor in tensors], tensors)
    targets = [
        Target(name, built.tensors[name], tensor, built.fresh)
        for tensor, (_, name) in zip(tensors, built.match.pairs, strict=True)
    ]
    windows = cut(tensors)
    done, total = 0, sum(window.nbytes for window in windows)
    with _relay(circle, windows, readers, read_into) as relay, torch.no_grad():
        for window, held in relay.arrivals():
            fill(targets, window, held)
            done += window.nbytes
            if progress is not None:
                progress(done, total)
    return targets


def _relay(circle: Circle, windows: tuple[Window, ...], readers: range, read_into: ReadInto) -> Relay:
    """Through shared memory where all ranks of every node can have it."""
    try:
        relay = Relay(circle, windows, readers, read_into)
        shared = True
    except OSError:
        shared = False
    if all(json.loads(text) for text in circle.everyone.gather(json.dumps(shared), "sharing memory")):
        return relay
    return Relay(without_shared_memory(circle), windows, readers, read_into)


def _one_after_the_other(tensors: list[TensorAt]) -> list[TensorAt]:
    """Places in a file that never was: the tensors' bytes without a gap."""
    placed, start = [], 0
    for tensor in tensors:
        placed.append(replace(tensor, start=start, file=""))
        start += tensor.nbytes
    return placed


def _from_memory(store: Store, source: Source, names: list[str], tensors: list[TensorAt]) -> ReadInto:
    """Reads of that file, from tensors that were read as a whole."""
    whole: dict[str, torch.Tensor] = {}
    for path, _ in source.files:
        whole |= load_pickled(store, path)

    def read_into(file: str, start: int, into: memoryview) -> None:
        stop = start + len(into)
        for name, tensor in zip(names, tensors, strict=True):
            first, end = max(start, tensor.start), min(stop, tensor.start + tensor.nbytes)
            if first < end:
                held = raw_bytes(whole[name])[first - tensor.start : end - tensor.start]
                into[first - start : end - start] = held

    return read_into
