"""The arithmetic fingerprint: what this machine's kernels really compute, operation by operation.

It is measured once per boot, torch version, CPU, thread count and environment, and kept in a folder of the user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dure.base.errors import UsageError
from dure.base.files import read_at_most, write_whole
from dure.comm.group import Group
from dure.device.accelerator import is_host
from dure.proof import battery
from dure.proof.battery import Battery

_READ_BY_LIBRARIES = (
    "ATEN_", "DNNL_", "GLIBC_TUNABLES", "KMP_", "LD_LIBRARY_PATH", "LD_PRELOAD", "MKL_", "OMP_", "ONEDNN_",
    "OPENBLAS_", "TORCH", "PYTORCH_",
)  # fmt: skip
"""How the environment variables begin that may change which kernels are used."""
_NOT_READ_FOR_KERNELS = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_")
_MOST_BYTES = 1 << 20
_MOST_KEPT = 64
_NAMED = 4


def arithmetic_fingerprint(device: torch.device, dtypes: Iterable[torch.dtype]) -> dict[str, str]:
    """Fingerprints of small operations' results, by name; at this process's thread count.

    Operations in fp32 have plain names; others begin with their dtype.
    """
    found: dict[str, str] = {}
    for dtype in sorted(set(dtypes), key=str):
        name = str(dtype).removeprefix("torch.")
        prefix = "" if dtype is torch.float32 else f"{name} "
        found |= {prefix + operation: bits for operation, bits in _measured(dtype, device).items()}
    return found


def agree_on_arithmetic(group: Group, device: torch.device, dtypes: Iterable[torch.dtype]) -> dict[str, str]:
    """The arithmetic fingerprint, the same on all ranks, or an error that names the operations that differ. A
    collective call."""
    own = arithmetic_fingerprint(device, dtypes)
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    told = group.gather(json.dumps([digest, socket.gethostname()]), "comparing arithmetic")
    digests, hosts = zip(*(json.loads(text) for text in told), strict=True)
    odd = next((rank for rank, other in enumerate(digests) if other != digests[0]), None)
    if odd is None:
        return own
    everyones = group.gather(json.dumps(own), "finding operations that differ")
    names = differing(json.loads(everyones[0]), json.loads(everyones[odd]))
    raise UsageError(
        f"rank {odd} ({hosts[odd]}) computes other bits than rank 0 ({hosts[0]}): {in_words(names, len(own))}; their "
        "CPUs or their libraries' settings (MKL_CBWR, ATEN_CPU_CAPABILITY, …) differ. Use nodes of one kind, or the "
        'same bits on all kinds: team.arithmetic = "portable"'
    )


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The operations that two machines compute differently, in the battery's order."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def in_words(names: list[str], of: int) -> str:
    """The first few operations, and how many there are."""
    more = ", …" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} ({len(names)} of {of} operations)"


def _measured(dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    folder = _cache_folder() if is_host(device) else None
    path = None if folder is None else folder / f"{_key(dtype, device)}.json"
    if path is not None and (known := _read(path)) is not None:
        return known
    found = Battery(dtype, device).run()
    if path is not None:
        with contextlib.suppress(OSError):  # a full disk only makes the next start slower
            _forget_oldest(path.parent)
            write_whole(path, json.dumps(found))
            path.chmod(0o600)
    return found


def _forget_oldest(folder: Path) -> None:
    """Those of earlier boots are of no use."""
    kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in kept[: max(len(kept) + 1 - _MOST_KEPT, 0)]:
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, str] | None:
    try:
        if not _is_private(path.lstat(), stat.S_ISREG):
            return None
        told = json.loads(read_at_most(path, _MOST_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(told, dict) or not all(isinstance(bits, str) for bits in told.values()):
        return None
    return told


def _cache_folder() -> Path | None:
    """A folder that no other user can write to; None where there is none to be had."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "dure" / "arithmetic"
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if _is_private(folder.lstat(), stat.S_ISDIR) else None
    except OSError:
        return None


def _is_private(found: os.stat_result, of_kind: Any) -> bool:
    return of_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _key(dtype: torch.dtype, device: torch.device) -> str:
    """sha256 of all that the measurement may depend on. A virtual machine may move to another CPU between two runs of a
    boot, so the CPU is in it besides the boot."""
    facts = {
        "battery": hashlib.sha256(Path(battery.__file__).read_bytes()).hexdigest(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "cpu": sorted(set(_described_cpu())),
        "torch": [torch.__version__, torch.__file__, torch.__config__.show()],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype),
        "device": str(device),
        "flags": [
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            str(torch.get_default_dtype()),
        ],
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_READ_BY_LIBRARIES) and not name.startswith(_NOT_READ_FOR_KERNELS)
        },
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _described_cpu() -> list[str]:
    """What the kernel says of the CPUs, without what changes from moment to moment (the clock rate)."""
    kept = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags", "Features")
    lines = _text("/proc/cpuinfo").splitlines()
    return [line for line in lines if line.partition("\t")[0].strip().rstrip(":") in kept]


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
