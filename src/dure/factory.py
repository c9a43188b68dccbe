"""The callables that a job names: `package.module:callable` or `path/file.py:callable`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dure.errors import JobError


def find(reference: str, key: str, folder: Path) -> Callable[..., Any]:
    """The callable behind `reference`; `key` is the setting that names it, for the error."""
    place, _, name = reference.partition(":")
    module = _load_file(folder / place, key) if place.endswith(".py") else _load_module(place, key)
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


def source_digest(reference: str, key: str, folder: Path) -> str:
    """sha256 of the file that the callable is written in; empty when it has none."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(find(reference, key, folder)))
    except TypeError:
        return ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _load_file(path: Path, key: str) -> ModuleType:
    name = f"dure_job_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise JobError(f"{key}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
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
