"""What runs on a node: versions and digests. Nothing heavy is imported to find out."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

_CHUNK = 1 << 20
_VERSION = re.compile(r"""^__version__ *(?::[^=]*)?= *['"]([^'"]+)['"]""", re.MULTILINE)


def versions() -> dict[str, str]:
    """The versions that nodes must share, as this interpreter would import them."""
    import dure

    return {
        "Python": platform.python_version(),
        "torch": torch_version(),
        "dure": f"{dure.__version__} ({_folder_digest(Path(dure.__file__).parent)[:8]})",
    }


def torch_version() -> str:
    """What `torch.__version__` would be, read from its file: importing torch takes a second."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "missing"
    try:
        match = _VERSION.search(Path(found.origin).with_name("version.py").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match[1] if match else importlib.metadata.version("torch")


def cpu_capability() -> str:
    """The instructions that torch will choose; other ones give other bits."""
    forced = os.environ.get("ATEN_CPU_CAPABILITY")
    if forced:
        return forced.lower()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            flags = next(
                (set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set()
            )
    except OSError:
        flags = set()
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"} <= flags:
        return f"{platform.machine()} avx512"
    if {"avx2", "fma"} <= flags:
        return f"{platform.machine()} avx2"
    return platform.machine()


def digests(files: Mapping[str, str]) -> dict[str, str | None]:
    """sha256 of each file; None where there is none. A name without a slash is a module's."""
    found: dict[str, str | None] = {}
    for label, place in files.items():
        path = Path(place) if "/" in place else module_file(place)
        try:
            found[label] = None if path is None else _file_digest(path)
        except OSError:
            found[label] = None
    return found


def module_file(name: str) -> Path | None:
    """The file of a module, found without importing the packages above it."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *rest)
        for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _folder_digest(folder: Path) -> str:
    """sha256 of the source files below a folder, names and contents."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".c", ".toml"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
