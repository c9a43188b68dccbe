"""Compiled Python files that are the same bytes wherever and whenever they are made.

An image cannot be written to, so what is not compiled in it would be compiled at every start. The usual `.pyc` names
the time of its source; these name the source's hash and are never compared with it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

from dure.image.contents import Entry

_UNCHECKED_HASH = 0b01
_BATCH = 200

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
    """A compiled file for every Python source among the entries; those that do not compile are left as they are."""
    sources = [entry for entry in entries if entry.path.endswith(".py") and entry.source is not None]
    batches = [sources[at : at + _BATCH] for at in range(0, len(sources), _BATCH)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for batch, compiled in zip(batches, pool.map(_compile, batches), strict=True):
            for entry, data in zip(batch, compiled, strict=True):
                if data is not None:
                    yield Entry(compiled_path(entry.path), data=data)


def compiled_path(path: str) -> str:
    """Where the interpreter looks for the compiled form of this source."""
    where = PurePosixPath(path)
    return f"{where.parent}/__pycache__/{where.stem}.{sys.implementation.cache_tag}.pyc"


def _compile(batch: Sequence[Entry]) -> list[bytes | None]:
    lines = "".join(json.dumps([str(entry.source), entry.path]) + "\n" for entry in batch)
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-S", "-c", _COMPILE],
        input=lines.encode(),
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
        env={"PYTHONHASHSEED": "0"},
    )
    return list(_unpacked(done.stdout))


def _unpacked(stream: bytes) -> Iterator[bytes | None]:
    header = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little")
    at = 0
    while at < len(stream):
        size = int.from_bytes(stream[at : at + 8], "little")
        source_hash, code = stream[at + 8 : at + 16], stream[at + 16 : at + 16 + size]
        at += 16 + size
        yield header + source_hash + code if code else None
