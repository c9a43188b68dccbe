"""Packages that were imported before the script, out of its sight until it imports them itself. Runs in a rank.

A script may do things first: set OMP_NUM_THREADS, or put a folder with another `transformers` on its path. When it gets
to `import torch`, what it has set since it began is looked at, and what can still be done is done.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType

from dure.base.say import say

_READ_AT_IMPORT = {
    "numpy": ("NPY_", "NUMPY_", "OPENBLAS_", "GOTO_"),
    "torch": ("OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "PYTORCH_"),
}
"""How the variables begin that a package, or a library under it, reads when it is loaded."""
_READ_LATER = (
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "MKL_CBWR", "MKL_VERBOSE", "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_FR_", "TORCH_HOME", "TORCH_NCCL_",
)  # fmt: skip
"""Those of them that are read when they are needed, so that a script is in time with them, or that other packages set
when they are imported, for libraries that are not there."""


class Preloaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder for packages that are in memory already.

    It takes them out of `sys.modules`, all modules of a package together, and puts them back when the package is
    imported, if it is the one that an interpreter of the script's own would find.
    """

    def __init__(self, packages: Collection[str], on_import: Callable[[str], None]) -> None:
        """Hide `packages`, as far as they are there; `on_import` is told when one of them is put back."""
        self._on_import = on_import
        self._hidden: dict[str, dict[str, ModuleType]] = {}
        self._specs: dict[str, importlib.machinery.ModuleSpec] = {}
        for package in packages:
            spec = getattr(sys.modules.get(package), "__spec__", None)
            if spec is not None:
                self._specs[package] = spec
                self._hidden[package] = {}
        for name in list(sys.modules):
            package = name.partition(".")[0]
            if package in self._hidden:
                self._hidden[package][name] = sys.modules.pop(name)
            elif package in packages:
                del sys.modules[name]  # what is left of a package whose import failed
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that leads to the package in memory; None for what is not there, or is another one."""
        if fullname not in self._hidden:
            return None
        found = _find_without(self, fullname)
        if found is None or found.origin != self._specs[fullname].origin:
            del self._hidden[fullname]  # the script has one of its own
            return None
        found.loader = self
        return found

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the package that is in memory."""
        return self._hidden[spec.name][spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Put all modules of the package back; they have run already."""
        package = module.__name__
        module.__spec__ = self._specs[package]
        self._put_back(package)
        self._on_import(package)

    def put_back_all(self) -> None:
        """Put back what was never imported, so that the interpreter takes it down with the others when it ends."""
        for package in list(self._hidden):
            self._put_back(package)
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _put_back(self, package: str) -> None:
        sys.modules.update(self._hidden.pop(package))


def _find_without(finder: Preloaded, package: str) -> importlib.machinery.ModuleSpec | None:
    for other in sys.meta_path:
        if other is not finder and (found := other.find_spec(package, None)) is not None:
            return found
    return None


class LateSettings:
    """What a script sets in its environment before it imports numpy or torch, which have read theirs already."""

    def __init__(self, set_by_import: Mapping[str, Mapping[str, str]], speaks: bool) -> None:
        """Make it when the script begins. `set_by_import`: for each package, the variables that its import sets.
        `speaks`: whether to tell the user."""
        self._at_start = dict(os.environ)
        self._set_by_import = set_by_import
        self._speaks = speaks

    def look(self, package: str) -> None:
        """Set what the import of `package` sets, apply what can be applied to it, say what may have no effect."""
        changed = late(package, self._at_start, os.environ)
        for name, value in self._set_by_import.get(package, {}).items():
            if os.environ.get(name) == self._at_start.get(name):  # what the script has set itself stays
                os.environ[name] = value
        if package == "torch":
            changed = _apply_to_torch(changed)
        if changed and self._speaks:
            say(
                f"{', '.join(sorted(changed))}: changed by the script before `import {package}`, but {package} is in "
                "memory already and may not notice; set it outside, or use `dure run --cold`"
            )


def late(package: str, before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that differ, with their values now, of those that `package` reads when it is loaded."""
    first = _READ_AT_IMPORT.get(package, ())
    return {
        name: now.get(name)
        for name in {*before, *now}
        if before.get(name) != now.get(name) and name.startswith(first) and not name.startswith(_READ_LATER)
    }


def _apply_to_torch(changed: Mapping[str, str | None]) -> dict[str, str | None]:
    """Do what torch would have done at its start; returns what it cannot do any more."""
    left = dict(changed)
    # The order of torch's own: MKL's number counts more than OpenMP's.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = left.get(name)
        if value is not None and value.isdecimal() and int(value) > 0:
            sys.modules["torch"].set_num_threads(int(value))
            del left[name]
    if left.get("TORCH_DISTRIBUTED_DEBUG") and "torch.distributed" in sys.modules:
        sys.modules["torch.distributed"].set_debug_level_from_env()
        del left["TORCH_DISTRIBUTED_DEBUG"]
    return left
