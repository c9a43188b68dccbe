"""The header of a safetensors file: where each tensor's bytes are. Trusts nothing, allocates next to nothing.

A file is 8 bytes (the header's length, little-endian), a JSON object, and the tensors' bytes without a gap:

    {"__metadata__": {"format": "pt"}, "wte.weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}}

The safetensors library maps the whole file, which network file systems do badly, and says less about what is wrong.
A JSON parser builds whatever the header asks for, twenty times its size, before anyone can look at it. So the
header's size and its outline are checked before it is parsed.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch

from dure.base.errors import WeightsError
from dure.storage import Store

LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
FIRST_READ = 32 * 1024
"""Bytes; most headers are shorter, so that one request brings the length and all of the header."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Types of whole bytes. F4 and F6 share bytes between elements, which no slice of a file can respect."""

_MOST_DIMENSIONS = 64
_LARGEST = 2**63 - 1

# Possessive (`++`, `*+`), so that no input makes them try twice: linear time, whatever a file holds.
_ATOMS = r'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+'
_OBJECT = rf"\{{(?:{_ATOMS}\[[^\"{{}}\[\]]*+\]){{0,8}}+{_ATOMS}\}}"
_OUTLINE = re.compile(rf"\{{(?:{_ATOMS}{_OBJECT})*+{_ATOMS}\}}\s*+", re.DOTALL)
"""One object of objects, each with a few lists of numbers: no depth, no lists by the million."""


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{said(twice)} stands there twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


STRICT_JSON = json.JSONDecoder(object_pairs_hook=_once_each, parse_constant=_no_constant)
"""Each key once, and no NaN."""


@dataclass(frozen=True, slots=True)
class TensorAt:
    """One tensor, and where its bytes are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    """Path in the storage."""
    start: int
    """Its first byte, counted from the start of the file."""
    nbytes: int

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.start + self.nbytes


def place(store: Store, path: str) -> str:
    """A file of the storage as people call it."""
    return f"{store.location.rstrip('/')}/{path}" if path else store.location


def read_header(store: Store, path: str) -> tuple[int, tuple[TensorAt, ...]]:
    """A safetensors file's size and its tensors, in the order of their bytes. One or two small reads."""
    file, size = place(store, path), store.size(path)
    if size < 8:
        raise WeightsError(
            f"{file} is {size} bytes long, too short for a safetensors file; copy it again from where it came"
        )
    first = store.read(path, 0, min(size, FIRST_READ))
    length = header_length(first[:8], file, size)
    head = first[8 : 8 + length]
    if len(head) < length:
        head += store.read(path, len(first), 8 + length - len(first))
    return size, parse_header(head, path, size, file)


def header_length(first: bytes, file: str, size: int) -> int:
    """What the first 8 bytes say, if it can be."""
    length = int.from_bytes(first, "little")
    if length <= min(LONGEST_HEADER, size - 8):
        return length
    if first == b"version ":
        raise WeightsError(
            f"{file} is a Git LFS pointer, not the weights themselves; fetch them (git lfs pull)"
        )
    limit = f"the file has {size:,}" if length > size - 8 else f"the format allows {LONGEST_HEADER:,}"
    raise WeightsError(
        f"{file}: its first 8 bytes announce a header of {length:,} bytes, but {limit}; it is truncated, damaged, or "
        "not a safetensors file"
    )


def parse_header(head: bytes, path: str, size: int, file: str | None = None) -> tuple[TensorAt, ...]:
    """The tensors that a header describes, checked against each other and the file's size.

    `path` goes into the tensors, `file` into errors.
    """
    called = file or path
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        _refuse(called, f"is not UTF-8 at byte {8 + error.start}")
    data = 8 + len(head)
    found = [
        _tensor(name, described, path, data, size, called)
        for name, described in _described(text, called).items()
    ]
    tensors = sorted(found, key=lambda tensor: (tensor.start, tensor.end))
    _refuse_gaps(tensors, data, size, called)
    return tuple(tensors)


def said(name: str) -> str:
    """A name for an error message: quoted, printable, not too long."""
    short = name if len(name) <= 120 else f"{name[:100]}…{name[-19:]}"
    return f"'{short}'" if short.isprintable() else ascii(short)


def _refuse(file: str, why: str) -> NoReturn:
    raise WeightsError(f"{file}: the safetensors header {why}; the file is damaged, get it again")


def _described(text: str, file: str) -> dict[str, Any]:
    """Each tensor's name and what stands there about it. Memory in proportion to the text, whatever it holds."""
    if not text.startswith("{"):
        _refuse(file, "does not begin with {")
    if not _OUTLINE.fullmatch(text):
        _refuse(
            file, f"is no JSON object of tensors and their dtype, shape and data_offsets: {said(text[:80])}"
        )
    try:
        described: dict[str, Any] = STRICT_JSON.decode(text)
        if "\\u" in text:  # half of a surrogate pair is no character, and could not even be printed
            json.dumps(described, ensure_ascii=False).encode()
    except ValueError as error:
        _refuse(file, f"is no valid JSON ({error})")
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(file, "has a __metadata__ that is not one object of texts")
    return described


def _tensor(name: str, described: object, path: str, data: int, size: int, file: str) -> TensorAt:
    if not isinstance(described, dict):
        _refuse(
            file, f"describes {said(name)} as {said(str(described))}, not as dtype, shape and data_offsets"
        )
    if absent := [key for key in ("dtype", "shape", "data_offsets") if key not in described]:
        _refuse(file, f"gives {said(name)} no {' and no '.join(absent)}")
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise WeightsError(f"{file}: {said(name)} has the dtype {said(str(dtype))}; known are {known}")
    if not _all_whole(shape) or len(shape) > _MOST_DIMENSIONS:
        _refuse(file, f"gives {said(name)} the shape {said(str(shape))}")
    if not _all_whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(file, f"gives {said(name)} the data_offsets {said(str(offsets))}")
    start, end = offsets
    if data + end > size:
        raise WeightsError(
            f"{file} is {size:,} bytes long, but {said(name)} would end at byte {data + end:,}; "
            "the file is truncated (a broken download or copy?), get it again"
        )
    # Without the zeros: an empty tensor must not hide a size that torch cannot count.
    if math.prod(length for length in shape if length) > _LARGEST:
        _refuse(file, f"gives {said(name)} the shape {said(str(shape))}, more elements than can be")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if nbytes != end - start:
        needs = f"{dtype} {shape} needs {nbytes:,} bytes"
        _refuse(file, f"gives {said(name)} {end - start:,} bytes, but {needs}")
    return TensorAt(name, DTYPES[dtype], tuple(shape), path, data + start, nbytes)


def _all_whole(values: object) -> bool:
    # `type is int`: a bool is an int to Python, and true is no length.
    return isinstance(values, list) and all(type(v) is int and 0 <= v <= _LARGEST for v in values)


def _refuse_gaps(tensors: list[TensorAt], data: int, size: int, file: str) -> None:
    """The bytes after the header belong to one tensor each, all of them."""
    if tensors and tensors[0].start != data:
        _refuse(file, f"leaves {tensors[0].start - data:,} bytes before {said(tensors[0].name)} to no tensor")
    for one, other in pairwise(tensors):
        if other.start < one.end:
            _refuse(file, f"lets {said(one.name)} and {said(other.name)} overlap")
        if other.start > one.end:
            gap = f"{other.start - one.end:,} bytes between {said(one.name)} and {said(other.name)}"
            _refuse(file, f"leaves {gap} to no tensor")
    end = tensors[-1].end if tensors else data
    if end != size:
        _refuse(file, f"leaves the last {size - end:,} bytes of the file to no tensor")
