"""torch._dynamo, imported when something is compiled, not by every first optimizer and DDP: it takes half a second.

torch asks it four things on the way of plain training, and the answers are known as long as nothing was compiled:

    disable(function)                      a function that is never compiled: itself
    graph_break()                          nothing to break
    utils.get_optimize_ddp_mode()          what torch._dynamo.config says, which is a module that costs nothing
    trace_rules.clear_lru_cache()          nothing is cached

Whatever else is asked of it imports it, and from then on it answers everything. Nothing of torch is changed: an import
finder gives the package's name to `_OnDemand` until then, as `importlib.util.LazyLoader` would, whose modules know no
answers. Only ranks of `dure train` have it, never a script of `dure run`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

_NAME = "torch._dynamo"
_CONFIG = f"{_NAME}.config"


def install() -> None:
    """Import torch._dynamo only when it is needed, from now on. Too late, and without effect, where it was already."""
    if _NAME not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _NAME:
            found = importlib.machinery.PathFinder.find_spec(fullname, path)
            if found is None or found.submodule_search_locations is None:
                return None
            spec = importlib.machinery.ModuleSpec(fullname, self, origin=found.origin, is_package=True)
            spec.submodule_search_locations = found.submodule_search_locations
            return spec
        if fullname.startswith(f"{_NAME}.") and fullname != _CONFIG:
            self.import_it()
            if fullname in sys.modules:
                return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _OnDemand(spec.name, self) if spec.name == _NAME else sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass

    def import_it(self) -> ModuleType:
        """Import the package itself, once."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            sys.modules.pop(_NAME, None)
            vars(sys.modules["torch"]).pop("_dynamo", None)
        return importlib.import_module(_NAME)


class _OnDemand(ModuleType):
    """Stands for torch._dynamo until it is imported, and passes on to it afterwards."""

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        known = {
            "disable": functools.partial(_disable, finder),
            "graph_break": lambda *_, **__: None,
            "utils": _Part(finder, "utils", get_optimize_ddp_mode=lambda: _ddp_mode(finder)),
            "trace_rules": _Part(finder, "trace_rules", clear_lru_cache=lambda: None),
        }
        vars(self).update(_finder=finder, _known=known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python's own machinery looks for
            raise AttributeError(name)
        finder, known = vars(self)["_finder"], vars(self)["_known"]
        if name in known and finder in sys.meta_path:
            return known[name]
        return getattr(finder.import_it(), name)


class _Part(SimpleNamespace):
    def __init__(self, finder: _Finder, name: str, **answers: Callable[..., Any]) -> None:
        super().__init__(**answers)
        self._finder, self._name = finder, name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._finder.import_it(), self._name), name)


def _disable(finder: _Finder, *args: Any, **kwargs: Any) -> Any:
    """What torch's own decorator asks for; any other use of it is a user's who compiles."""
    if len(args) != 2 or kwargs != {"wrapping": False}:
        return finder.import_it().disable(*args, **kwargs)
    function = args[0]
    disabled: list[Callable[..., Any]] = []  # made when there is something to be kept out of

    def call(*inner: Any, **named: Any) -> Any:
        if finder in sys.meta_path:
            return function(*inner, **named)
        if not disabled:
            disabled.append(finder.import_it().disable(*args, **kwargs))
        return disabled[0](*inner, **named)

    return call


def _ddp_mode(finder: _Finder) -> str:
    if importlib.import_module(_CONFIG).optimize_ddp is True:
        return "ddp_optimizer"
    mode: str = finder.import_it().utils.get_optimize_ddp_mode()
    return mode
