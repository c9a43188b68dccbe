"""Which device each rank computes on: agreed by all ranks before any process group is made, and said why.

Everything here is by `torch.accelerator`, so it is the same for every kind of device that torch knows. A device index
and a current stream are each thread's own: whoever starts a thread that uses the device calls `make_current` in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dure.base.errors import UsageError

CPU = torch.device("cpu")
_HOST = "cpu"


@dataclass(frozen=True)
class Seen:
    """What one rank sees of accelerators, and what it was asked for."""

    wanted: str
    """`auto`, `cpu`, or a kind of accelerator."""
    host: str
    node: int
    local_rank: int
    local_size: int
    kind: str = ""
    """Of its accelerators; "" where there is none."""
    models: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    """Of the devices themselves, where the driver tells: ranks that each see only their own are told apart by them."""

    @property
    def count(self) -> int:
        """How many it sees."""
        return len(self.models)

    def to_json(self) -> str:
        """For the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Seen:
        """What another rank's `to_json` gave."""
        told = json.loads(text)
        return cls(**{**told, "models": tuple(told["models"]), "ids": tuple(told["ids"])})


@dataclass(frozen=True)
class Decision:
    """What all ranks compute on."""

    kind: str
    indices: tuple[int, ...] = ()
    """Of each rank's device, by rank; empty for the CPU."""
    why: str = ""
    """Why it is the CPU, where it could be thought to be something else."""

    def device(self, rank: int) -> torch.device:
        """One rank's."""
        return torch.device(self.kind, self.indices[rank]) if self.indices else CPU

    def to_json(self) -> str:
        """For the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """What `to_json` gave."""
        told = json.loads(text)
        return cls(told["kind"], tuple(told["indices"]), told["why"])


def look(wanted: str, host: str, node: int, local_rank: int, local_size: int) -> Seen:
    """What this process sees. Whoever asks for the CPU does not touch a driver."""
    asked = (wanted, host, node, local_rank, local_size)
    kind = None if wanted == _HOST else torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return Seen(*asked)
    properties = [_properties(kind.type, index) for index in range(torch.accelerator.device_count())]
    ids = tuple(str(getattr(one, "uuid", "")) for one in properties)
    return Seen(*asked, kind.type, tuple(str(one.name) for one in properties), ids)


def decide(seen: Sequence[Seen]) -> Decision:
    """What all ranks compute on, given what each of them sees; the same for the same. Pure.

    Raises UsageError where what was asked for cannot be had, or where devices of different models would give ranks
    different bits.
    """
    wanted = seen[0].wanted
    for rank, one in enumerate(seen):
        if one.wanted != wanted:
            raise UsageError(
                f"device is {wanted!r} on rank 0 and {one.wanted!r} on rank {rank}; start all with the same"
            )
    if wanted == _HOST:
        return Decision(_HOST)
    indices, why = _indices(seen)
    if why:
        if wanted != "auto":
            raise UsageError(f"device is {wanted}, but {why}; use cpu, or fewer ranks per node")
        return Decision(_HOST, (), why if any(one.count for one in seen) else "")
    models = [one.models[index] for one, index in zip(seen, indices, strict=True)]
    for rank, model in enumerate(models):
        if model != models[0]:
            raise UsageError(
                f"rank 0 on {seen[0].host} has a {models[0]} and rank {rank} on {seen[rank].host} a {model}, which "
                "compute other bits; use nodes of one kind, or device cpu"
            )
    return Decision(seen[0].kind, tuple(indices))


def _indices(seen: Sequence[Seen]) -> tuple[list[int], str]:
    """Each rank's device; or why they cannot all have one."""
    kind = next((one.kind for one in seen if one.kind), "")
    if seen[0].wanted not in ("auto", kind):
        kind = seen[0].wanted
    indices: list[int] = []
    for one in seen:
        if one.kind != kind or not one.count:
            what = f"{one.count} of kind {one.kind}" if one.count else "none"
            return [], f"{one.host} has no device of kind {kind or 'accelerator'} ({what})"
        if one.count >= one.local_size:
            indices.append(one.local_rank)
        elif _sees_its_own(one, seen):
            indices.append(0)
        else:
            return [], f"{one.host} has {one.count} device(s) of kind {kind} for {one.local_size} ranks"
    used: dict[tuple[int, str], int] = {}
    for rank, (one, index) in enumerate(zip(seen, indices, strict=True)):
        if one.ids[index] and used.setdefault((one.node, one.ids[index]), rank) != rank:
            other = used[one.node, one.ids[index]]
            return [], f"ranks {other} and {rank} on {one.host} would share one device"
    return indices, ""


def _sees_its_own(one: Seen, seen: Sequence[Seen]) -> bool:
    """Whether the ranks of its node each see other devices, as srun --gpus-per-task binds them, or parts of one."""
    firsts = [other.ids[0] for other in seen if other.node == one.node and other.count]
    return all(firsts) and len(set(firsts)) == one.local_size


def is_host(device: torch.device) -> bool:
    """Whether it is the CPU: memory that every library reads, and no streams."""
    return device.type == _HOST


def make_current(device: torch.device) -> None:
    """In every thread that uses the device: a thread begins on device 0."""
    if not is_host(device):
        torch.accelerator.set_device_index(device.index)


def wait_for(device: torch.device) -> None:
    """Let the host wait until the device has done all that it was given."""
    if not is_host(device):
        torch.accelerator.synchronize(device)


def backends_for(device: torch.device) -> str:
    """The backends of a process group of ranks on such devices: Gloo for the host's tensors, the device's for its."""
    if is_host(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def device_for_small_things(group: dist.ProcessGroup | None) -> torch.device:
    """Where a group takes tensors from: the host if it can, else the device that is current."""
    backends = str(dist.get_backend_config(group))
    if "cpu:" in backends or ":" not in backends:
        return CPU
    found = torch.accelerator.current_accelerator()
    assert found is not None, backends
    return torch.device(found.type, torch.accelerator.current_device_index())


def draws_kept(device: torch.device) -> AbstractContextManager[None]:
    """Whatever is drawn within `with`, torch's generators of the host and of the device then go on from where they
    were."""
    if is_host(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device.index], device_type=device.type)


def described(device: torch.device) -> dict[str, Any]:
    """What of a device decides its bits, or is good to know when they differ; {} for the CPU."""
    if is_host(device):
        return {}
    properties = _properties(device.type, device.index)
    units = ("multi_processor_count", "gpu_eu_count", "max_compute_units")
    return {
        "name": str(properties.name),
        "units": next((int(getattr(properties, name)) for name in units if hasattr(properties, name)), 0),
        "capability": [getattr(properties, "major", 0), getattr(properties, "minor", 0)],
        "libraries": _libraries(),
        "driver": driver_version(),
    }


def driver_version() -> str:
    """The kernel driver's version, as far as the kernel tells; "" where there is none."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/xe/version"):
        try:
            lines = Path(path).read_text(errors="replace").splitlines()
        except OSError:
            continue
        if lines:
            return lines[0].strip()
    return ""


def _libraries() -> dict[str, str]:
    """What torch was built for and with: CUDA or HIP, cuDNN."""
    version = torch.version
    found = {name: getattr(version, name, None) for name in ("cuda", "hip", "xpu")}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {name: str(value) for name, value in {**found, "cudnn": cudnn}.items() if value}


def _properties(kind: str, index: int) -> Any:
    return torch.get_device_module(kind).get_device_properties(index)
