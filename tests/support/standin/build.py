"""Compiles the stand-in once per source, compiler and torch version, into the user's cache; other processes wait."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ("streams.cpp", "operators.cpp", "collectives.cpp")
NAME = "dure_standin"
_FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={NAME}")


def compiler() -> str | None:
    """The C++ compiler; None where there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def why_not() -> str:
    """Why the stand-in cannot be had here; "" when it can."""
    if compiler() is None:
        return "no C++ compiler for the stand-in device"
    if not (Path(torch.__file__).parent / "include" / "ATen" / "ATen.h").is_file():
        return "this torch has no headers for the stand-in device"
    return ""


def library() -> Path:
    """The compiled stand-in; made at the first call, which takes a minute or so."""
    path = _cache() / _key() / f"{NAME}.so"
    if path.is_file():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(_cache() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            _compile(path)
    return path


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "dure" / "standin"


def _key(files: tuple[str, ...] = (*SOURCES, "streams.h", "build.py")) -> str:
    digest = hashlib.sha256()
    for name in files:
        digest.update((HERE / name).read_bytes())
    digest.update(f"{torch.__version__} {sysconfig.get_python_version()} {compiler()}".encode())
    return digest.hexdigest()[:24]


def _compile(path: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    flags = [
        *_FLAGS,
        *(f"-I{one}" for one in (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))),
    ]
    objects = [
        _cache() / f"{Path(source).stem}-{_key((source, 'streams.h', 'build.py'))}.o" for source in SOURCES
    ]
    missing = [(source, made) for source, made in zip(SOURCES, objects, strict=True) if not made.is_file()]
    running = [
        subprocess.Popen(
            [compiler(), *flags, "-c", HERE / source, "-o", made.with_suffix(".new")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for source, made in missing
    ]
    told = [one.communicate()[1] for one in running]
    if any(one.returncode for one in running):
        raise RuntimeError("the stand-in device does not compile:\n" + "\n".join(told))
    for _, made in missing:
        made.with_suffix(".new").rename(made)
    made = path.with_suffix(f".{os.getpid()}")
    libraries = torch_folder / "lib"
    linked = subprocess.run(
        [
            compiler(), "-shared", *objects, "-o", made, f"-L{libraries}", "-lc10", "-ltorch", "-ltorch_cpu",
            "-ltorch_python", f"-Wl,-rpath,{libraries}",
        ],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if linked.returncode:
        raise RuntimeError(f"the stand-in device does not link:\n{linked.stderr}")
    made.rename(path)
