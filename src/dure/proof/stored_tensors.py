"""Hashes of the tensors in checkpoints and safetensors files, without torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dure.base.errors import ReceiptWrong
from dure.base.files import open_plain, read_at_most
from dure.proof.receipt import leaf

_LONGEST_MANIFEST = 64 << 20
_LONGEST_HEADER = 100_000_000
_CHUNK = 1 << 22
_DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "U16": ("uint16", 2), "I16": ("int16", 2),
    "F16": ("float16", 2), "BF16": ("bfloat16", 2), "U32": ("uint32", 4), "I32": ("int32", 4), "F32": ("float32", 4),
    "U64": ("uint64", 8), "I64": ("int64", 8), "F64": ("float64", 8), "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
}  # fmt: skip
"""Of safetensors: torch's name, and bytes per element."""
_WRITTEN = {"format": "pt", "written_by": "dure"}
_BYTES = dict(_DTYPES.values())


def of_checkpoint(place: Path) -> tuple[int, dict[str, bytes]]:
    """(step, leaves by name) of a checkpoint, all of whose hashes were compared."""
    try:
        told = json.loads(read_at_most(place / "manifest.json", _LONGEST_MANIFEST))
        digest = told.pop("sha256")
        body = json.dumps(told, sort_keys=True, separators=(",", ":")).encode()
        if hashlib.sha256(body).hexdigest() != digest:
            raise ReceiptWrong(f"{place / 'manifest.json'} was changed: it does not have its own hash")
        step = int(told["facts"]["step"])
        pieces = _pieces(place, told)
        leaves = {
            name: leaf(name, dtype, shape, _bytes_of(sorted(pieces.get(at, []), key=lambda piece: piece[0])))
            for at, (name, dtype, shape) in enumerate(told["tensors"])
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReceiptWrong(f"{place} was changed: its manifest cannot be read ({error})") from None
    return step, leaves


def _pieces(place: Path, told: dict[str, Any]) -> dict[int, list[tuple[int, Path, int, int]]]:
    """(first element, file, offset, bytes) of each tensor's pieces, by its number."""
    found: dict[int, list[tuple[int, Path, int, int]]] = {}
    for file in told["files"]:
        path = place / Path(file["name"]).name
        if not path.is_file():
            raise ReceiptWrong(f"{path} is missing")
        if _sha256(path) != file["sha256"]:
            raise ReceiptWrong(f"{path} was changed: it does not have the hash that the manifest says")
        at = int(file["data"])
        for number, start, stop in file["pieces"]:
            size = (stop - start) * _BYTES[told["tensors"][number][1]]
            found.setdefault(number, []).append((start, path, at, size))
            at += size
    return found


def _bytes_of(pieces: list[tuple[int, Path, int, int]]) -> Iterator[bytes]:
    for _, path, at, size in pieces:
        with open(open_plain(path), "rb") as file:
            file.seek(at)
            yield from _read(file, size)


def of_safetensors(path: Path, prefix: str) -> dict[str, bytes]:
    """Leaves of all tensors in a file, by name with `prefix` before it."""
    with open(open_plain(path), "rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            raise ReceiptWrong(f"{path} is no safetensors file, or its header was changed")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            metadata = header.pop("__metadata__", _WRITTEN)
            if metadata not in (_WRITTEN, {"format": "pt"}):
                raise ReceiptWrong(f"{path}: its metadata is neither what dure nor what transformers writes")
            tensors = sorted(_entry(path, name, entry) for name, entry in header.items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ReceiptWrong(f"{path} was changed: its header cannot be read") from None
        leaves, end = {}, 0
        for start, stop, name, dtype, itemsize, shape in tensors:
            if start != end or stop - start != math.prod(shape) * itemsize:
                raise ReceiptWrong(f"{path} was changed: {name} does not lie where it should")
            end = stop
            leaves[prefix + name] = leaf(prefix + name, dtype, shape, _read(file, stop - start))
        if 8 + length + end != size:
            raise ReceiptWrong(f"{path} was changed: it has {size:,} bytes instead of {8 + length + end:,}")
    return leaves


def _entry(path: Path, name: str, entry: dict[str, Any]) -> tuple[int, int, str, str, int, list[int]]:
    """(first byte, end, name, dtype, bytes per element, shape)."""
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ReceiptWrong(f"{path} was changed: {name} has an entry that cannot be read")
    start, stop = map(int, entry["data_offsets"])
    dtype, itemsize = _DTYPES[entry["dtype"]]
    return start, stop, name, dtype, itemsize, list(map(int, entry["shape"]))


def _read(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0:
        part = file.read(min(size, _CHUNK))
        if not part:
            raise ReceiptWrong(f"{file.name} ends too early")
        yield part
        size -= len(part)


def _sha256(path: Path) -> str:
    with open(open_plain(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
