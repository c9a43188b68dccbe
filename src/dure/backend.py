"""The torch.distributed backend "dure": `init_process_group("dure")`.

`import torch` calls `register` in every process of an installation that has dure (an entry point of `torch.backends`),
so this module imports nothing but what it needs to be known by name; the rest comes with the first process group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NAME = "dure"
BACKEND_VARIABLE = "DURE_BACKEND"
"""Set by `dure run --backend`: the backend that scripts get where they ask for gloo."""


def register() -> None:
    """Make the backend known to torch.distributed; once, however often it is called."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    backend: Any = getattr(module, "Backend", None)  # None: a torch that was built without distributed
    if backend is not None and NAME not in backend.backend_list:
        backend.register_backend(NAME, _create, devices=["cpu"])
    stand_in_for_gloo(os.environ)


def stand_in_for_gloo(environ: Mapping[str, str]) -> None:
    """Give groups of the backend dure to a script that asks for gloo, if `dure run --backend dure` started it.

    Call it with torch imported, before the script makes a group. Such a group is called gloo by torch, as the script
    expects it, so that what torch allows with that name alone goes on to work.
    """
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    gloo = getattr(module, "ProcessGroupGloo", None)
    if environ.get(BACKEND_VARIABLE) == NAME and gloo is not None and not isinstance(gloo, _IsGloo):
        module.ProcessGroupGloo = _IsGloo("ProcessGroupGloo", (_InPlaceOfGloo,), {"real": gloo})


class _IsGloo(type):
    """What torch makes in place of a ProcessGroupGloo counts as one."""

    def __instancecheck__(cls, instance: object) -> bool:
        return instance is not None


class _InPlaceOfGloo:
    """Makes a group of the backend dure, or a real one of Gloo's where groups are for accelerators too."""

    real: Any
    told = False

    def __new__(cls, store: Store, rank: int, size: int, timeout: timedelta, **options: Any) -> Any:
        import torch

        from dure.base.say import say

        if torch.accelerator.is_available():
            if rank == 0 and not _InPlaceOfGloo.told:
                say(
                    "--backend dure is for CPUs, and torch finds an accelerator: process groups stay as they are"
                )
            _InPlaceOfGloo.told = True
            return cls.real(store, rank, size, timeout=timeout, **options)
        group = _create(store, rank, size, timeout)
        if rank == 0 and not _InPlaceOfGloo.told:
            how = "shared memory" if group.shares_memory else "Gloo, as before"
            say(f"--backend dure: the script asked for gloo and gets dure; its collectives go through {how}")
        _InPlaceOfGloo.told = True
        return group


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from dure.comm.backend.process_group import ProcessGroupDure

    return ProcessGroupDure(store, rank, size, timeout)


if "torch" in sys.modules:  # `import dure.backend` before `import torch`: the entry point does it then
    register()
