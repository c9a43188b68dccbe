"""How weights reach the device that they are for: through this host's memory, or straight from the storage.

On CUDA with `kvikio` installed, a folder's files are read straight into device memory: by GPUDirect Storage where the
driver and the file system have it, else by kvikio's own way over the host. Each rank reads some of the tensors, and
the others get them over NCCL. No CUDA device has been at hand to run that on; only the choice is tested.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dure.device.fingerprint import raw_bytes
from dure.storage import Store
from dure.weights.filling import Target
from dure.weights.load_group import LoadContext


@dataclass(frozen=True)
class Way:
    """The way that was chosen."""

    direct: bool
    """Straight from the storage into device memory."""
    why: str


def choose_way(device_type: str, location: str, *, sliceable: bool, how: str) -> Way:
    """Choose, from what is installed and where the weights lie."""
    if device_type != "cuda":
        return Way(False, f"read into memory, where the parameters of a {device_type} model are")
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


def read_direct(
    targets: Sequence[Target], store: Store, context: LoadContext, device: torch.device
) -> dict[str, int]:
    """Fill the targets on the device; returns what this rank read: requests and bytes."""
    kvikio = importlib.import_module("kvikio")
    if "nccl" not in context.groups:
        context.groups["nccl"] = dist.new_group(backend="nccl")
    rank, ranks = context.everyone.rank, context.everyone.size
    shares = [0] * ranks
    used = {"requests": 0, "bytes": 0}
    for target in targets:
        owner = shares.index(min(shares))  # the same on all ranks
        shares[owner] += target.source.nbytes
        there = torch.empty(target.source.shape, dtype=target.source.dtype, device=device)
        if owner == rank and there.nbytes:
            with kvikio.CuFile(str(Path(store.location) / target.source.file), "r") as file:
                file.read(there, there.nbytes, target.source.start)
            used = {"requests": used["requests"] + 1, "bytes": used["bytes"] + there.nbytes}
        dist.broadcast(there, owner, group=context.groups["nccl"])
        target.tensor.data = there.to(target.tensor.dtype)
        target.digest.update(raw_bytes(target.tensor))
    return used
