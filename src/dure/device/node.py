"""What a node has for its devices, in words for a report: driver, links, libraries; and torch's own checkers."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dure.device.accelerator import driver_version

_SECONDS = 20


def node_words(wanted: str) -> dict[str, Any]:
    """Kind and number of devices, driver, collective libraries, links. No device is taken into use."""
    kind = None if wanted == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    links = _links()
    return {
        "kind": "cpu" if kind is None else kind.type,
        "devices": 0 if kind is None else torch.accelerator.device_count(),
        "driver": driver_version(),
        "collectives": _collectives(),
        **({"links": links} if links else {}),
    }


def sanitizer_environment(kind: str) -> dict[str, str]:
    """Variables with which torch checks, in a process, that work in several streams is ordered; {} if it cannot."""
    return {"TORCH_CUDA_SANITIZER": "1"} if kind == "cuda" and torch.version.cuda else {}


def counts_waits(device: torch.device) -> bool:
    """Whether torch can tell when the host waits for such a device."""
    return hasattr(torch.get_device_module(device), "set_sync_debug_mode")


@contextmanager
def waits_counted() -> Iterator[Callable[[], int]]:
    """Within `with`, how often this process's host code waited for the device so far."""
    module: Any = torch.get_device_module()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchroniz" in str(one.message).lower() for one in told)
        finally:
            module.set_sync_debug_mode("default")


def _collectives() -> dict[str, str]:
    found = {"gloo": "yes" if dist.is_gloo_available() else "no"}
    if dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if dist.is_xccl_available():
        found["xccl"] = "yes"
    return found


def _links() -> str:
    """Between the devices, as the driver's own tool draws them; "" where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        ran = subprocess.run(
            [tool, "topo", "-m"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", ran.stdout).rstrip() if ran.returncode == 0 else ""
