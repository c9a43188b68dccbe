"""The callables that a job names: `package.module:callable` or `path/file.py:callable`."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dure.base.errors import JobError


def find(reference: str, key: str, folder: Path) -> Callable[..., Any]:
    """The callable behind `reference`; `key` is the setting that names it, for the error."""
    place, _, name = reference.partition(":")
    module = _module_of(reference, key, folder)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            offered = ", ".join(
                n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))
            )
            raise JobError(f"{key}: {place} has no {name}; it has {offered or 'nothing to call'}")
        found = getattr(found, part)
    if not callable(found):
        raise JobError(f"{key}: {reference} is a {type(found).__name__}, not something to call")
    return found  # type: ignore[no-any-return]


def make(reference: str, key: str, folder: Path, arguments: Mapping[str, Any]) -> Any:
    """Call the factory; what it raises becomes one line that names it."""
    factory = find(reference, key, folder)
    try:
        return factory(**arguments)
    except JobError as error:
        raise JobError(f"{key}: {error}") from error
    except Exception as error:
        raise JobError(f"{key}: {reference} raised {type(error).__name__}: {error}") from error


def own_code(references: Mapping[str, str], folder: Path) -> dict[str, str]:
    """sha256 of the files that what a job names is written in, by name: those that the references name or lead to, and
    the modules beside them (in the job's folder, or in the same package) that these import, as far as they are loaded.

    `references` are by the setting that names them.
    """
    ahead, roots = [], {str(folder.resolve())}
    for key, reference in references.items():
        named = _module_of(reference, key, folder)
        behind = sys.modules.get(getattr(_written(find(reference, key, folder)), "__module__", ""))
        for module in (named, behind):
            if module is not None and (path := _path_of(module)):
                ahead.append(module)
                roots.add(_root(path, module))
    digests: dict[str, str] = {}
    while ahead:
        module = ahead.pop()
        path = _path_of(module)
        name = _name_of(path, module, folder)
        if name not in digests:
            digests[name] = _sha256(path)
            found = (sys.modules.get(other) for other in _imported_by(module, path))
            ahead += [other for other in found if other is not None and _is_own(_path_of(other), roots)]
    return digests


def loaded_code(folder: Path) -> dict[str, str]:
    """sha256 of the user's own files below `folder` that are loaded now, by their path in it."""
    base = folder.resolve()
    paths = {path for module in list(sys.modules.values()) if (path := _path_of(module))}
    own = sorted(path for path in paths if _is_own(os.path.realpath(path), {str(base)}))
    return {str(Path(os.path.realpath(path)).relative_to(base)): _sha256(path) for path in own}


def _path_of(module: ModuleType) -> str:
    """The source file of a module; "" when it has none."""
    path = getattr(module, "__file__", None)
    return os.path.abspath(path) if isinstance(path, str) and path.endswith(".py") else ""


def _imported_by(module: ModuleType, path: str) -> set[str]:
    """Names that may be modules: what its source imports anywhere, also in functions, and what its globals are of."""
    names = {getattr(value, "__module__", None) or "" for value in vars(module).values()}
    names |= {value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)}
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError):  # edited since: its digest tells
        return names
    package = module.__package__ or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name for name in names if isinstance(name, str)}


def _written(found: Any) -> Any:
    """The function or class behind a partial, a bound method, a decorated function or an instance."""
    while True:
        if isinstance(found, functools.partial | functools.partialmethod):
            found = found.func
        elif inspect.ismethod(found):
            found = found.__func__
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        else:
            return found if inspect.isroutine(found) or inspect.isclass(found) else type(found)


def _root(path: str, module: ModuleType) -> str:
    """The folder that a module's neighbours are in: its package's, or its own."""
    package = sys.modules.get(module.__name__.partition(".")[0])
    whole = getattr(package, "__path__", None)
    return os.path.abspath(next(iter(whole), "") if whole else os.path.dirname(path))


def _is_own(path: str, roots: set[str]) -> bool:
    """Whether a file is the user's, below one of these folders; what was installed has a version instead."""
    if not path:
        return False
    foreign = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.abspath(__file__)))
    if "site-packages" in path or any(path.startswith(root + os.sep) for root in foreign):
        return False
    return any(path.startswith(root + os.sep) for root in roots)


def _name_of(path: str, module: ModuleType, folder: Path) -> str:
    """The same on every node: relative to the job's folder, or the module's name."""
    resolved = Path(path).resolve()
    base = folder.resolve()
    name = str(resolved.relative_to(base)) if resolved.is_relative_to(base) else module.__name__
    return name.encode(errors="backslashreplace").decode()  # for a path that is not UTF-8


def _sha256(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _module_of(reference: str, key: str, folder: Path) -> ModuleType:
    place, _, _ = reference.partition(":")
    return _load_file(folder / place, key) if place.endswith(".py") else _load_module(place, key)


def _load_file(path: Path, key: str) -> ModuleType:
    name = f"dure_job_{path.stem}_{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise JobError(f"{key}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:  # as for a script: modules beside it can be imported
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise JobError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise JobError(
            f"{key}: the module {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
