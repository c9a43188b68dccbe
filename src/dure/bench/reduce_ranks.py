"""The ranks of `dure bench reduce`: one all-reduce after the other, contender by contender, round by round."""

from __future__ import annotations

import errno
import json
import os
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

import dure
from dure.errors import DureError
from dure.reduce.exchanger import Pieces

MPI_SECONDS = 60.0
"""How long OpenMPI's ranks may take for one answer."""

Seconds = dict[str, dict[str, list[float]]]
"""Contender → size in MiB → seconds of one all-reduce, a figure a round."""


def repeats_for(mib: float) -> int:
    """How often an all-reduce is repeated in a round: about the same time for every size."""
    return max(2, min(40, int(40 / max(mib, 1))))


def measure(sizes: list[float], rounds: int, mpi_folder: str | None) -> Seconds:
    """Entry point of a rank: every contender on every size, interleaved."""
    with dure.start(shards=dist_size()) as team:
        ranks = team.world.size
        shape = Pieces.of_step(ranks, ranks, ranks)
        shared = team.exchanger()
        found: Seconds = {}
        for mib in sizes:
            numel = int(mib * 2**20) // 4
            contenders: dict[str, Callable[[], object]] = {}
            if shared is not None:
                room = shared.room(0, torch.ones(numel))
                contenders["dure"] = lambda room=room: shared.exchange(room, shape, 1.0 / ranks)  # type: ignore[misc]
            ours, source, target = torch.ones(numel), torch.ones(numel), torch.zeros(numel)
            contenders["gloo"] = lambda ours=ours: dist.all_reduce(ours)  # type: ignore[misc]
            contenders["memcpy"] = lambda target=target, source=source: target.copy_(source)  # type: ignore[misc]
            timed = _interleaved(contenders, repeats_for(mib), rounds, mpi_folder, numel, team.rank)
            for name, seconds in timed.items():
                found.setdefault(name, {})[str(mib)] = seconds
        if mpi_folder is not None and team.rank == 0:
            _tell_mpi(Path(mpi_folder), ranks, "end")
        if shared is not None:
            shared.close()
        return found


def dist_size() -> int:
    """The number of ranks, before a team is there."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _interleaved(
    contenders: Mapping[str, Callable[[], object]],
    repeats: int,
    rounds: int,
    mpi_folder: str | None,
    numel: int,
    rank: int,
) -> dict[str, list[float]]:
    """Seconds of one call, a figure a round; the first round warms up and is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    if mpi_folder is not None:
        found["openmpi"] = []
    for _ in range(rounds + 1):
        for name, call in contenders.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            found[name].append((time.perf_counter() - began) / repeats)
        dist.barrier()
        if mpi_folder is not None:
            if rank == 0:
                found["openmpi"].append(_ask_mpi(Path(mpi_folder), dist.get_world_size(), numel, repeats))
            else:
                found["openmpi"].append(0.0)
    return {name: seconds[1:] for name, seconds in found.items()}


def _tell_mpi(folder: Path, ranks: int, message: str) -> None:
    for rank in range(ranks):
        _write(folder / f"ask-{rank}", message + "\n")


def _write(pipe: Path, text: str) -> None:
    """Write into a named pipe as soon as somebody reads it."""
    deadline = time.monotonic() + MPI_SECONDS
    while True:
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > deadline:
                raise DureError(
                    f"OpenMPI's rank does not read {pipe.name}; is mpirun still alive?"
                ) from error
            time.sleep(0.005)
            continue
        with os.fdopen(descriptor, "w") as line:
            line.write(text)
        return


def _ask_mpi(folder: Path, ranks: int, numel: int, repeats: int) -> float:
    """OpenMPI's seconds: its ranks sleep in a pipe of their own until they are asked."""
    _tell_mpi(folder, ranks, f"{numel} {repeats}")
    descriptor = os.open(folder / "answer", os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not select.select([descriptor], [], [], MPI_SECONDS)[0]:
            raise DureError(f"OpenMPI did not finish within {MPI_SECONDS:.0f} s")
        return float(json.loads(os.read(descriptor, 4096)))
    finally:
        os.close(descriptor)
