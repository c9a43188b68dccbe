"""How weights reach the device that they are for: through this host's memory, or straight from the storage.

On an accelerator with `kvikio` installed on all ranks, a folder's files are read straight into device memory: by
GPUDirect Storage where the driver and the file system have it, else by kvikio's own way over the host. Each rank reads
some of the tensors, and the others get them by the device's own collectives. No CUDA device has been at hand to run
kvikio itself; `dure selftest` does, where there is one.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dure.comm.group import Group, group_of, naming_the_wait
from dure.device.accelerator import is_host
from dure.storage import Store
from dure.weights.filling import Target
from dure.weights.load_group import LoadContext

READ_BYTES = 256 << 20
"""Read at once, between two signs of life."""


@dataclass(frozen=True)
class Way:
    """The way that was chosen."""

    direct: bool
    """Straight from the storage into device memory."""
    why: str


def choose_way(device: torch.device, location: str, *, sliceable: bool, how: str) -> Way:
    """Choose, from what is installed here and where the weights lie."""
    if is_host(device):
        return Way(False, f"read into memory, where the parameters of a {device.type} model are")
    through = "read into host memory, then copied to the device"
    if how != "slices":
        return Way(False, f"{through}: load is {how!r}, and only slices are read straight into device memory")
    if "://" in location:
        return Way(False, f"{through}: {location} is not a file system")
    if not sliceable:
        return Way(False, f"{through}: a file from before torch 1.6 can only be read as a whole")
    if importlib.util.find_spec("kvikio") is None:
        return Way(False, f"{through}: kvikio is not installed (pip install kvikio-cu12)")
    return Way(True, "read straight into device memory with kvikio")


def agree_on_way(own: Way, everyone: Group) -> Way:
    """One way for all ranks, as they read for each other: straight only if all of them can. A collective call."""
    told = [
        Way(**json.loads(text)) for text in everyone.gather(json.dumps(asdict(own)), "choosing a way to load")
    ]
    odd = next((rank for rank, way in enumerate(told) if not way.direct), None)
    if odd is None or not own.direct:
        return own
    return Way(False, f"{told[odd].why} (on rank {odd}, and all ranks go one way)")


def read_direct(
    targets: Sequence[Target],
    store: Store,
    context: LoadContext,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Fill the targets on the device; returns what this rank read: requests and bytes. `progress` is told often."""
    kvikio = importlib.import_module("kvikio")
    if "device" not in context.groups:
        context.groups["device"] = group_of(None, context.deadline_seconds, device)
    rank, ranks = context.everyone.rank, context.everyone.size
    shares = [0] * ranks
    used = {"requests": 0, "bytes": 0}
    done, total = 0, sum(target.source.nbytes for target in targets)
    for target in targets:
        owner = shares.index(min(shares))  # the same on all ranks
        shares[owner] += target.source.nbytes
        there = torch.empty(target.source.shape, dtype=target.source.dtype, device=device)
        if there.nbytes and owner == rank:
            with kvikio.CuFile(str(Path(store.location) / target.source.file), "r") as file:
                for start, part in _parts(there):
                    file.read(part, part.nbytes, target.source.start + start)
                    used = {"requests": used["requests"] + 1, "bytes": used["bytes"] + part.nbytes}
                    if progress is not None:
                        progress(done + start, total)
        with naming_the_wait(rank, "loading weights"):
            dist.broadcast(there, owner, group=context.groups["device"])
        target.tensor.data = there.to(target.tensor.dtype)
        done += target.source.nbytes
        if progress is not None:
            progress(done, total)
    return used


def _parts(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    flat = tensor.view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), READ_BYTES):
        yield start, flat[start : start + READ_BYTES]
