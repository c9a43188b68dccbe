"""Strange files of weights, thousands of them: never a crash, a hang or an allocation out of proportion, always one
clear error; and whatever is accepted is what the format's own reader reads."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors
import torch

from dure.base.errors import StorageError, WeightsError
from dure.device.fingerprint import raw_bytes
from dure.storage.safetensors import DTYPES
from dure.weights.source import Source, open_source

FILES = 30_000
PICKLES = 600
SEED = 20_260
NAMES = ["a", "b.weight", "한글", "", "__metadata__", "a\n", "🙂", "x" * 300, "\ud800", '"', "\\"]
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 1.0, 1e308, float("nan"), "", "F32"),
    *(
        [],
        {},
        [[]],
        [[1]],
        [{}],
        {"a": {}},
        [-1],
        [0, 0],
        [2**63, 2],
        [0, 2**62, 2**62],
        [1] * 65,
        [True],
        "1",
    ),
]
STRICTER = (
    "dtype '",  # types whose elements share bytes; and complex or 8-bit ones of other makers
    "the shape",  # more dimensions, or elements, than torch can count
    "does not begin with",
    "is no JSON object of tensors",  # nested extras
    "__metadata__",
)
"""What is refused here and accepted by the format's own reader."""


class Memory:
    """A store of one file that is not even on a disk, and keeps to the rules of one."""

    location = "memory"

    def __init__(self, content: bytes) -> None:
        self.content = content

    def size(self, path: str) -> int:
        return len(self.content)

    def read(self, path: str, start: int, length: int) -> bytes:
        if start < 0 or length < 0 or start + length > len(self.content):
            raise StorageError(f"{path} has no bytes {start} to {start + length}")
        return self.content[start : start + length]


def valid_header(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {}
    at = 0
    if rng.random() < 0.3:
        header["__metadata__"] = {rng.choice("abc"): rng.choice(["", "}", '"]', "한"])}
    for number in range(rng.randrange(6)):
        dtype = rng.choice(list(DTYPES))
        shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
        nbytes = DTYPES[dtype].itemsize
        for length in shape:
            nbytes *= length
        name = rng.choice(["w", "layer.0.bias", "한글", "x" * 50]) + str(number)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    if rng.random() < 0.3:
        items = list(header.items())
        rng.shuffle(items)
        header = dict(items)
    return header, rng.randbytes(at)


def packed(header: Any, data: bytes, rng: random.Random | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode(errors="surrogatepass")
    if rng and rng.random() < 0.3:
        text += b" " * rng.randrange(9)
    return struct.pack("<Q", len(text)) + text + data


def lying(rng: random.Random) -> bytes:
    """A header that is well-formed JSON, mostly, and not true."""
    header, data = valid_header(rng)
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice([*header, rng.choice(NAMES)])
        entry = header.get(name)
        if not isinstance(entry, dict) or rng.random() < 0.2:
            header[name] = copy.deepcopy(rng.choice(ODD))
        elif rng.random() < 0.2 and entry:
            entry.pop(rng.choice(list(entry)))
        elif rng.random() < 0.3 and isinstance(entry.get("data_offsets"), list) and entry["data_offsets"]:
            place = rng.randrange(len(entry["data_offsets"]))
            entry["data_offsets"][place] = rng.choice([*range(10), 2**40, -1, copy.deepcopy(rng.choice(ODD))])
        else:
            key = rng.choice(["dtype", "shape", "data_offsets", "extra"])
            entry[key] = copy.deepcopy(
                rng.choice([*ODD, *DTYPES, "F4", "F6_E2M3", "C128", [1], [2, 2], [0, 4], [4, 8]])
            )
    text = json.dumps(header).encode(errors="surrogatepass")
    if rng.random() < 0.2 and header:  # a name twice
        again = json.dumps({rng.choice(list(header)): rng.choice(list(header.values()))}).encode()
        text = text[:-1] + b", " + again[1:]
    return packed(text, data + rng.randbytes(rng.choice([0, 0, 0, 1, 8])), rng)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, put in, taken out, moved or cut off; mostly in front, where the header is."""
    changed = bytearray(content)
    for _ in range(rng.randrange(1, 5)):
        if not changed:
            break
        at = (
            min(int(rng.expovariate(1 / 60)), len(changed) - 1)
            if rng.random() < 0.8
            else rng.randrange(len(changed))
        )
        match rng.randrange(7):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                changed[at:at] = rng.choice(
                    [b"[", b"{", b'"', b"9" * rng.randrange(30), b"\\", b"\x00", b","]
                )
            case 3:
                del changed[at : at + rng.randrange(1, 9)]
            case 4:
                del changed[at:]
            case 5:
                changed += changed[at : at + rng.randrange(1, 99)]
            case _:
                digit = next((i for i in range(at, len(changed)) if 48 <= changed[i] <= 57), at)
                changed[digit] = rng.choice(b"0123456789-.e")
    if rng.random() < 0.5 and len(changed) > 8:  # the length right again, so that the rest is looked at
        end = changed.rfind(b"}") + 1
        changed[:8] = struct.pack("<Q", max(end - 8, 0))
    return bytes(changed)


def corpus(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(seed)
    for _ in range(count):
        match rng.randrange(10):
            case 0:
                yield "random", rng.randbytes(rng.randrange(80))
            case 1:
                yield (
                    "random",
                    packed(b"{" + rng.randbytes(rng.randrange(60)), rng.randbytes(rng.randrange(9))),
                )
            case 2:
                yield "valid", packed(*valid_header(rng), rng)
            case 3 | 4 | 5:
                yield "lying", lying(rng)
            case _:
                yield "mutated", mutated(packed(*valid_header(rng), rng), rng)


def names_twice(content: bytes) -> bool:
    """Whether a name stands in the header twice: the format forbids it, its own reader takes the last."""
    found: list[bool] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        found.append(len(dict(pairs)) < len(pairs))

    length = int.from_bytes(content[:8], "little")
    json.loads(content[8 : 8 + length], object_pairs_hook=look)
    return any(found)


def reference(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    """What the format's own reader makes of it."""
    try:
        read = safetensors.deserialize(content)
    except Exception:
        return None
    return {name: (told["dtype"], list(told["shape"]), bytes(told["data"])) for name, told in read}


def test_thirty_thousand_strange_files_give_one_clear_error_or_what_the_formats_own_reader_gives() -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    outcomes: Counter[tuple[str, str]] = Counter()
    for number, (kind, content) in enumerate(corpus(SEED, FILES)):
        started = time.process_time()
        theirs = reference(content)
        try:
            source = open_source(Memory(content), "w.safetensors")  # type: ignore[arg-type]
        except WeightsError as error:
            text = str(error)
            assert text.startswith("memory/w.safetensors"), (number, text)
            assert text.isprintable(), (number, text)
            assert len(text) < 1000, (number, text)
            text.encode()
            if theirs is not None:
                assert any(why in text for why in STRICTER) or names_twice(content), (number, text, content)
            outcomes[kind, "refused"] += 1
        else:
            ours = {
                t.name: (names[t.dtype], list(t.shape), content[t.start : t.start + t.nbytes])
                for t in source.tensors
            }
            assert ours == theirs, (number, content)
            assert Source.from_json(source.to_json()) == source
            outcomes[kind, "accepted"] += 1
        assert time.process_time() - started < 20, (number, content)
    assert sum(outcomes.values()) == FILES
    assert outcomes["valid", "refused"] == 0
    # The corpus is worth its name: each kind got far enough to be refused for what it is, and some got through.
    assert outcomes["valid", "accepted"] > FILES / 20
    assert outcomes["lying", "refused"] > FILES / 10
    assert outcomes["mutated", "refused"] > FILES / 10
    assert outcomes["mutated", "accepted"] > 50


def test_no_strange_file_makes_us_allocate_much_more_than_its_size() -> None:
    tracemalloc.start()
    try:
        for number, (_, content) in enumerate(corpus(7, 2000)):
            _opened_within(content, 64 * 1024 + 32 * len(content), number)
    finally:
        tracemalloc.stop()


MEGABYTES = 4 * 1024 * 1024


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b'{"a":[' + b"[]," * (MEGABYTES // 3), id="lists"),
        pytest.param(b'{"a":' + b'{"a":' * (MEGABYTES // 5), id="deep objects"),
        pytest.param(b'{"a":{"shape":[' + b"0," * (MEGABYTES // 2), id="a shape without end"),
        pytest.param(b'{"a":{"shape":[' + b"9" * MEGABYTES + b"]}}", id="one huge number"),
        pytest.param(b'{"' + b"\\u0041" * (MEGABYTES // 6) + b'":3}', id="a huge name"),
        pytest.param(b'{"__metadata__":{' + b'"a":[],' * (MEGABYTES // 7) + b"}}", id="metadata of lists"),
        pytest.param(b'{"__metadata__":{' + b'"a":"",' * (MEGABYTES // 7), id="metadata without end"),
        pytest.param(b"{" + b" " * MEGABYTES + b"}}", id="white space"),
        pytest.param(b'{"' + b'\\"' * (MEGABYTES // 2), id="a name without end"),
    ],
)
def test_a_long_header_made_to_explode_is_refused_in_proportion(head: bytes) -> None:
    tracemalloc.start()
    started = time.process_time()
    try:
        assert not _opened_within(packed(head, b""), 8 * len(head), 0)
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 20


def _opened_within(content: bytes, most: int, number: int) -> bool:
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        open_source(Memory(content), "w.safetensors")  # type: ignore[arg-type]
        opened = True
    except WeightsError:
        opened = False
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before <= most, (number, peak - before, len(content), content[:200])
    return opened


def test_damaged_pickles_give_one_clear_error_or_places_inside_of_the_file() -> None:
    rng = random.Random(5)
    state = {"a": torch.arange(8.0), "layer.b": torch.ones(2, 3, dtype=torch.bfloat16), "n": torch.tensor(3)}
    accepted, said = 0, []
    for number in range(PICKLES):
        file = io.BytesIO()
        torch.save(state, file, _use_new_zipfile_serialization=bool(number % 3))
        content = bytearray(file.getvalue())
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(content))
            match rng.randrange(3):
                case 0:
                    content[at] = rng.randrange(256)
                case 1:
                    del content[at : at + rng.choice([1, 2, 50])]
                case _:
                    content[at:at] = rng.randbytes(rng.choice([1, 2, 50]))
        try:
            source = open_source(Memory(bytes(content)), "w.pth")  # type: ignore[arg-type]
        except WeightsError as error:
            said.append(str(error))
        else:
            accepted += 1
            assert all(t.end <= len(content) for t in source.tensors)
    assert all("w.pth" in text and len(text) < 1000 for text in said)
    assert 0 < accepted < PICKLES  # damage to the numbers themselves cannot be seen
    whole = open_source(Memory(file.getvalue()), "w.pth")  # type: ignore[arg-type]
    found = {t.name: file.getvalue()[t.start : t.end] for t in whole.tensors}
    assert found == {name: bytes(raw_bytes(tensor)) for name, tensor in state.items()}
