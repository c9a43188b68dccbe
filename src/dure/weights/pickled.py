"""What `torch.save` wrote (`.pth`, `.pt`, `.bin`): read without running anything that is in it.

A pickle is a program. torch's weights-only unpickler refuses all of it but tensors and plain containers, and is the
only one used here. Files of today are zip archives whose tensors lie in them uncompressed: their places are found
from the directory and the small pickle, so that ranks can read slices of such a file as of any other. Files from
before torch 1.6 are one stream, which can only be read as a whole: their tensors have no place.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from dure.base.errors import DureError, WeightsError
from dure.storage import Store
from dure.storage.safetensors import DTYPES, TensorAt, place, said

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")
"""Keys that training scripts keep the weights under, beside an optimizer, an epoch and so on."""
NO_PLACE = -1
"""The start of a tensor that no byte range of its file holds."""

_BLOCK = 1024
_LOCAL_HEADER = 30
_LARGEST_PICKLE = 256 * 1024 * 1024


def read_pickled(store: Store, path: str) -> tuple[int, tuple[TensorAt, ...]]:
    """The file's size and its tensors, from a few small reads; the whole file if it is of the old form."""
    file, size = place(store, path), store.size(path)
    if store.read(path, 0, min(size, 4)) != b"PK\x03\x04":
        whole = load_pickled(store, path)
        return size, tuple(
            TensorAt(name, tensor.dtype, tuple(tensor.shape), path, NO_PLACE, tensor.nbytes)
            for name, tensor in whole.items()
        )
    window = _Window(store, path, size)
    records = _records(window, file, size)
    tensors = _state(_unpickle(window, "meta", file), file)
    found = [_placed(name, tensor, records, path, file) for name, tensor in tensors.items()]
    return size, tuple(sorted(found, key=lambda tensor: (tensor.start, tensor.end)))


def load_pickled(store: Store, path: str) -> dict[str, torch.Tensor]:
    """All tensors of the file, read as a whole, once."""
    file = place(store, path)
    content = io.BytesIO(store.read(path, 0, store.size(path)))
    return {name: tensor.detach() for name, tensor in _state(_unpickle(content, "cpu", file), file).items()}


class _Window(io.RawIOBase):
    """A file of the storage as Python's zipfile and torch want one; small reads come in blocks, kept."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0
        self._read = store.read
        self._path = path
        self._block = lru_cache(maxsize=256)(self._read_block)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError("a place before the start of the file")
        self._at = start + offset
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(self._size - self._at, 0)
        length = left if size is None or size < 0 else min(size, left)
        if length > _BLOCK:
            data = self._read(self._path, self._at, length)
        else:
            first, last = self._at // _BLOCK, (self._at + length) // _BLOCK
            start = self._at - first * _BLOCK
            data = b"".join(map(self._block, range(first, last + 1)))[start : start + length]
        self._at += length
        return data

    def readinto(self, into: Any, /) -> int:
        data = self.read(len(into))
        into[: len(data)] = data
        return len(data)

    def _read_block(self, number: int) -> bytes:
        start = number * _BLOCK
        length = min(_BLOCK, self._size - start)
        return self._read(self._path, start, length) if length > 0 else b""


def _records(window: _Window, file: str, size: int) -> dict[int, int]:
    """First byte and length of every uncompressed record of the archive."""
    records = {}
    try:
        with zipfile.ZipFile(window) as archive:
            for info in archive.infolist():
                if info.filename.endswith("/data.pkl") and info.file_size > min(size, _LARGEST_PICKLE):
                    raise WeightsError(f"{file}: its pickle would be {info.file_size:,} bytes long")
                if info.compress_type != zipfile.ZIP_STORED:
                    raise WeightsError(
                        f"{file}: {said(info.filename)} is compressed, so the file was packed again after torch.save; "
                        "use the file that torch.save wrote"
                    )
                # The directory does not say how long the record's own header is, only that header does.
                window.seek(info.header_offset)
                local = window.read(_LOCAL_HEADER)
                lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
                start = info.header_offset + _LOCAL_HEADER + lengths
                if start + info.file_size > size:
                    raise WeightsError(
                        f"{file}: {said(info.filename)} would end after the file; get the file again"
                    )
                records[start] = info.file_size
            if any(info.filename.endswith("/byteorder") for info in archive.infolist()):
                name = next(n for n in archive.namelist() if n.endswith("/byteorder"))
                if archive.read(name) != b"little":
                    raise WeightsError(
                        f"{file} was saved on a big-endian machine; save it on a little-endian one"
                    )
    except DureError:
        raise
    except Exception as error:
        raise WeightsError(
            f"{file} is a damaged or truncated archive ({type(error).__name__}: {error}); get the file again"
        ) from error
    window.seek(0)
    return records


def _unpickle(file_like: Any, device: str, file: str) -> object:
    try:
        with warnings.catch_warnings():
            # From torch 2.15 on, said of sparse tensors, which are refused here anyway.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
            return torch.load(file_like, map_location=device, weights_only=True, mmap=False)
    except DureError:
        raise
    except pickle.UnpicklingError as error:
        # torch's own text goes on to explain how to run the pickle anyway; nobody should.
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {named[1]}" if named else "it is not a pickle of tensors and plain containers"
        raise WeightsError(
            f"{file} holds more than weights: {reason}, which could run code of its own, so nothing of it was run. "
            "Save the weights alone (torch.save(model.state_dict(), …)), or better as safetensors"
        ) from error
    except (
        NotImplementedError
    ) as error:  # from torch 2.15 on: it looks into a sparse tensor, and finds no data
        raise WeightsError(f"{file} holds a sparse tensor; only plain dense tensors can be loaded") from error
    except Exception as error:
        first = str(error).strip().split("\n")[0][:200]
        raise WeightsError(
            f"{file} cannot be read as what torch.save writes ({type(error).__name__}: {first}); "
            "it is damaged, truncated, or another kind of file"
        ) from error


def _state(loaded: object, file: str) -> dict[str, torch.Tensor]:
    """The names and tensors, wherever in the file they are."""
    found = loaded
    for _ in range(4):
        if not isinstance(found, Mapping) or any(isinstance(value, torch.Tensor) for value in found.values()):
            break
        inner = next((key for key in WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inner is None:
            break
        found = found[inner]
    if not isinstance(found, Mapping):
        raise WeightsError(
            f"{file} holds a {type(found).__name__}, not names with tensors (model.state_dict())"
        )
    odd = {key: value for key, value in found.items() if not isinstance(value, torch.Tensor)}
    if odd or not all(isinstance(key, str) for key in found) or not found:
        listed = ", ".join(
            f"{said(str(key))} ({type(value).__name__})" for key, value in list(odd.items())[:8]
        )
        raise WeightsError(
            f"{file} does not hold names with tensors alone, but also {listed or 'nothing'}"
            f"{' …' if len(odd) > 8 else ''}; save model.state_dict(), by itself or under {said(WRAPPERS[0])}"
        )
    for name, tensor in found.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES.values():
            kind = f"{tensor.dtype}, {tensor.layout}"
            raise WeightsError(f"{file}: {said(name)} is {kind}; only plain dense tensors can be loaded")
    return dict(found)


def _placed(name: str, tensor: torch.Tensor, records: dict[int, int], path: str, file: str) -> TensorAt:
    record: int = getattr(tensor.untyped_storage(), "_checkpoint_offset", NO_PLACE)
    if not tensor.is_contiguous():
        raise WeightsError(
            f"{file}: {said(name)} is a view with strides {tuple(tensor.stride())}; "
            "save it as tensor.contiguous(), so that its bytes lie in one piece"
        )
    start = int(tensor.storage_offset()) * tensor.itemsize
    if record not in records or start + tensor.nbytes > records[record]:
        raise WeightsError(
            f"{file}: the bytes of {said(name)} are not where the archive says; it was packed again after torch.save, "
            "or is damaged: use the file that torch.save wrote"
        )
    return TensorAt(name, tensor.dtype, tuple(tensor.shape), path, record + start, tensor.nbytes)
