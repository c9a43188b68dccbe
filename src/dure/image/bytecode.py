"""Compiled Python files that are the same bytes wherever and whenever they are made.

An image cannot be written to, so what is not compiled in it would be compiled at every start. The usual `.pyc` names
the time of its source; these name the source's hash and are never compared with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from dure.base.files import write_whole
from dure.image.contents import Entry
from dure.image.tree import cache

_UNCHECKED_HASH = 0b01
_TOGETHER = 8
"""Files whose first so many names are the same (`…/site-packages/torch/nn`) are compiled, and cached, together."""
_KEPT_SECONDS = 30 * 24 * 3600.0

# In a process of its own without `site`: what else a process has imported decides which constants it shares, and with
# it the bytes. The hash seed orders sets of constants.
_COMPILE = """
import json, marshal, sys, warnings
from _imp import source_hash
from importlib.util import _RAW_MAGIC_NUMBER
warnings.simplefilter("ignore")
for line in sys.stdin:
    source, target = json.loads(line)
    with open(source, "rb") as file:
        text = file.read()
    try:
        code = compile(text, target, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError, RecursionError):
        compiled = b""
    else:
        compiled = marshal.dumps(code)
    sys.stdout.buffer.write(len(compiled).to_bytes(8, "little") + source_hash(_RAW_MAGIC_NUMBER, text) + compiled)
"""


def compiled_entries(entries: Sequence[Entry]) -> Iterator[Entry]:
    """A compiled file for every Python source among the entries; those that do not compile are left as they are.

    What was compiled for an earlier image is taken from the cache: a rebuild compiles what changed.
    """
    sources = [entry for entry in entries if entry.path.endswith(".py") and entry.source is not None]
    groups = [
        list(group)
        for _, group in itertools.groupby(
            sources, lambda entry: PurePosixPath(entry.path).parent.parts[:_TOGETHER]
        )
    ]
    _forget_unused()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for group, compiled in zip(groups, pool.map(_cached, groups), strict=True):
            for entry, data in zip(group, compiled, strict=True):
                if data is not None:
                    yield Entry(compiled_path(entry.path), data=data)


def compiled_path(path: str) -> str:
    """Where the interpreter looks for the compiled form of this source."""
    where = PurePosixPath(path)
    return f"{where.parent}/__pycache__/{where.stem}.{sys.implementation.cache_tag}.pyc"


def _cached(group: Sequence[Entry]) -> list[bytes | None]:
    key = hashlib.sha256(importlib.util.MAGIC_NUMBER + _COMPILE.encode())
    for entry in group:
        assert entry.source is not None
        key.update(f"{entry.path}\0{hashlib.sha256(entry.source.read_bytes()).hexdigest()}\0".encode())
    kept = _folder() / key.hexdigest()
    try:
        stream = kept.read_bytes()
        os.utime(kept)
        found = list(_unpacked(stream))
        if len(found) == len(group):
            return found
    except OSError:
        pass  # not there: the usual case, or not to be read: as good as not there
    stream = _compile(group)
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, stream)
    return list(_unpacked(stream))


def _folder() -> Path:
    return cache() / "compiled"


def _forget_unused() -> None:
    """Drop from the cache what no build has used for a month."""
    with contextlib.suppress(OSError):
        for kept in _folder().iterdir():
            if time.time() - kept.stat().st_mtime > _KEPT_SECONDS:
                kept.unlink(missing_ok=True)


def _compile(group: Sequence[Entry]) -> bytes:
    lines = "".join(json.dumps([str(entry.source), entry.path]) + "\n" for entry in group)
    return subprocess.run(
        [sys.executable, "-P", "-s", "-S", "-c", _COMPILE],
        input=lines.encode(),
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
        env={"PYTHONHASHSEED": "0"},
    ).stdout


def _unpacked(stream: bytes) -> Iterator[bytes | None]:
    header = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little")
    at = 0
    while at < len(stream):
        size = int.from_bytes(stream[at : at + 8], "little")
        source_hash, code = stream[at + 8 : at + 16], stream[at + 16 : at + 16 + size]
        at += 16 + size
        yield header + source_hash + code if code else None
