"""A device that is none: the host's memory and the CPU's kernels, but streams that really run later, each in a thread.

Whoever forgets to wait for a stream computes with bytes that are not there yet, here as on a GPU; so it shows, without
one, whether code that runs on a device orders its work. Its bits are the CPU's, so that results can be compared.

- What is put into a stream is done later, after a random pause (STANDIN_PAUSE_US at most, from STANDIN_SEED).
- Fresh memory, and memory that no tensor needs any more, is overwritten, in the stream it was allocated on.
- Copies from and to pinned memory with `non_blocking` happen later too; all other copies wait.
- Each of STANDIN_DEVICES devices has random numbers of its own; the current device and stream are each thread's own.
- Collectives (`standin_ccl`) behave as NCCL's: device tensors only, of the current device, in one stream of a group's.
- It refuses to be used in a process whose parent used it before the fork.

`use()` makes it known to torch. `torch.backends` entry points do that too, where AUTOLOAD is on the module search path.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections import namedtuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.standin.build import NAME, library, why_not

__all__ = ["AUTOLOAD", "KIND", "counts", "use", "why_not"]

KIND = "standin"
AUTOLOAD = Path(__file__).parent / "autoload"
"""A folder for PYTHONPATH: with it and the folder of tests, every process that imports torch has the stand-in."""
Counts = namedtuple("Counts", "later at_once waits fills")
Properties = namedtuple("Properties", "name multi_processor_count total_memory uuid major minor")


@functools.cache
def use() -> Any:
    """Make the stand-in torch's accelerator in this process; returns the compiled module."""
    path = str(library())
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules[NAME] = native
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, _module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("standin_ccl", functools.partial(_group, native), devices=[KIND])
    return native


def counts() -> Counts:
    """Operations put into streams and done at once, waits of the host, fills; since the process began."""
    return Counts(*use().counts())


@contextlib.contextmanager
def kvikio() -> Any:
    """Within `with` there is a kvikio, whose files are read straight into the stand-in's memory."""

    class CuFile:
        def __init__(self, path: str, _mode: str) -> None:
            self._path = path

        def __enter__(self) -> CuFile:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def read(self, into: torch.Tensor, nbytes: int, offset: int) -> int:
            with open(self._path, "rb") as file:
                file.seek(offset)
                data = bytearray(file.read(nbytes))
            use().raw_copy(into, torch.frombuffer(data, dtype=torch.uint8).clone())
            torch.accelerator.synchronize()
            return nbytes

    module = types.ModuleType("kvikio")
    module.__spec__ = importlib.machinery.ModuleSpec("kvikio", None)
    module.CuFile = CuFile
    sys.modules["kvikio"] = module
    try:
        yield
    finally:
        del sys.modules["kvikio"]


def _group(native: Any, store: Any, rank: int, size: int, timeout: Any) -> Any:
    return native.collectives(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


def _module(native: Any) -> types.ModuleType:
    """What is `torch.cuda` for a GPU."""
    made = types.ModuleType(f"torch.{KIND}")

    def index_of(device: Any) -> int:
        if device is None:
            return int(native.current_device())
        return device if isinstance(device, int) else torch.device(device).index or 0

    def manual_seed_all(seed: int) -> None:
        for device in range(native.device_count()):
            native.seed(device, seed)

    made.is_available = lambda: native.device_count() > 0
    made.device_count = native.device_count
    made.current_device = native.current_device
    made.set_device = lambda device: native.set_device(index_of(device))
    made.synchronize = lambda device=None: native.synchronize()
    made.is_initialized = lambda: True
    made._is_in_bad_fork = native.is_in_bad_fork
    made.manual_seed = lambda seed: native.seed(native.current_device(), seed)
    made.manual_seed_all = manual_seed_all
    made.get_rng_state = lambda device=None: native.random_state(index_of(device))
    made.set_rng_state = lambda state, device=None: native.set_random_state(index_of(device), state)
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    made.get_device_name = lambda device=None: "a stand-in"
    made.get_device_properties = lambda device=None: Properties(
        "a stand-in", 1, 1 << 30, f"standin-{index_of(device)}", 1, 0
    )
    return made
