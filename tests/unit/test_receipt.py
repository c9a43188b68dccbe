"""The receipt's chain: one way to write it, one way to continue it, and no bit that can change unnoticed."""

import hashlib
import json
import random
import struct
import subprocess
import sys

import pytest

from dure.base.errors import ReceiptWrong
from dure.proof.receipt import (
    BODY,
    LANES,
    RECORD,
    Chain,
    GapRecord,
    RootRecord,
    StepRecord,
    lane_words,
    lanes_of,
    leaf,
    link,
    merkle_root,
)
from dure.proof.receipt_lines import append, lines
from dure.proof.verify_receipt import ReceiptFolder, verify


def record(step, **other):
    values = {"samples": 8, "loss": 1 / (step + 1), "mark": step * 7, "content": step * 11}
    lanes = {"losses": tuple(range(step, step + LANES)), "gradients": tuple(range(LANES))}
    return StepRecord(step=step, **{**values, **lanes, **other})


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "receipt"
    place.mkdir()
    words = {"job": {"seed": 1}}
    head = {
        "format": 1,
        "recipe": hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest(),
        "recipe_words": words,
        "versions": {},
        "image": None,
        "shards": 8,
        "root_every": 0,
    }
    (place / "head").write_text(json.dumps(head, sort_keys=True))
    return place


def opened(folder):
    return Chain(folder / "steps", (folder / "head").read_bytes())


def test_a_record_is_shorter_than_200_bytes_and_reads_back():
    assert RECORD <= 200
    for one in (record(3), RootRecord(4, b"w" * 32, b"o" * 32), GapRecord(2, 9)):
        assert type(one).from_bytes(one.to_bytes()) == one
        assert len(one.to_bytes()) == BODY


def test_steps_that_are_computed_again_must_be_the_same_and_nothing_is_written_twice(folder):
    chain = opened(folder)
    for step in range(5):
        assert chain.add(record(step)) is None
    chain.add(RootRecord(5, b"w" * 32, b"o" * 32))
    whole = (folder / "steps").read_bytes()
    chain.close()
    again = opened(folder)
    again.go_on_at(3)
    assert again.add(record(3)) is None
    assert again.add(record(4, loss=0.25)) == record(4)
    assert record(4, loss=0.25).differs_from(record(4), 8) == "another mean loss"
    assert (folder / "steps").read_bytes() == whole
    last = opened(folder)
    last.go_on_at(5)
    last.add(record(5))
    assert verify(folder).steps == 6
    assert verify(folder).gaps == []


def test_what_a_crash_cut_short_is_no_record_and_what_is_missing_is_a_gap(folder):
    chain = opened(folder)
    for step in range(3):
        chain.add(record(step))
    with (folder / "steps").open("ab") as file:
        file.write(b"half a record")
    assert "cut short" in verify(folder).notes[0]
    again = opened(folder)
    again.go_on_at(7)
    again.add(record(7))
    found = verify(folder)
    assert (found.steps, found.gaps) == (8, [(3, 7)])
    assert "3 to 6 are not in the receipt" in found.notes[0]


def test_other_samples_content_losses_and_gradients_are_told_apart():
    one = record(1)
    assert one.differs_from(record(1, mark=1), 8) == "other samples"
    assert one.differs_from(record(1, content=1), 8) == "other content of its samples"
    losses = list(one.losses)
    losses[5] += 1
    assert one.differs_from(record(1, losses=tuple(losses)), 8) == "another loss in shard 5"
    assert lane_words(5, 8) == "shard 5"
    assert lane_words(1, 16) == "shards 2 to 3"
    values = [struct.pack("<Q", n + 1) for n in range(16)]
    changed = [*values[:3], struct.pack("<Q", 99), *values[4:]]
    differing = [a != b for a, b in zip(lanes_of(values, 8), lanes_of(changed, 8), strict=True)]
    assert differing == [lane == 1 for lane in range(8)]


def test_the_root_depends_on_every_leaf_its_place_and_their_number():
    leaves = [leaf(f"t{n}", "float32", (2,), [bytes(8)]) for n in range(7)]
    roots = {merkle_root(leaves[:n]) for n in range(8)}
    roots.add(merkle_root([leaves[1], leaves[0], *leaves[2:]]))
    roots.add(merkle_root([*leaves[:6], leaf("t6", "int32", (2,), [bytes(8)])]))
    assert len(roots) == 10


def test_a_record_that_is_taken_out_or_put_elsewhere_is_found(folder):
    chain = opened(folder)
    for step in range(6):
        chain.add(record(step))
    whole = (folder / "steps").read_bytes()
    parts = [whole[at : at + RECORD] for at in range(0, len(whole), RECORD)]
    for changed in (parts[:2] + parts[3:], [parts[1], parts[0], *parts[2:]], [*parts, parts[-1]]):
        (folder / "steps").write_bytes(b"".join(changed))
        with pytest.raises(ReceiptWrong):
            verify(folder)
    # Whoever chains it again cannot leave a step out either.
    hashed, out = hashlib.sha256((folder / "head").read_bytes()).digest(), b""
    for part in parts[:2] + parts[3:]:
        hashed = link(hashed, part[:BODY])
        out += part[:BODY] + hashed
    (folder / "steps").write_bytes(out)
    with pytest.raises(ReceiptWrong, match="record 2 is of step 3, and 2 should come"):
        verify(folder)


def test_every_flipped_bit_of_a_small_receipt_is_found(folder):
    chain = opened(folder)
    for step in range(2):
        chain.add(record(step))
    chain.add(RootRecord(2, b"w" * 32, b"o" * 32))
    line = {"step": 2, "records": 3, "chain": chain.last.hex(), "weights": (b"w" * 32).hex()}
    append(folder / "checkpoints", {**line, "optimizer": (b"o" * 32).hex(), "at": "then"})
    append(folder / "sessions", {"ranks": 2})
    verify(folder)
    chosen = random.Random(5)
    for path in (folder / "head", folder / "steps", folder / "checkpoints", folder / "sessions"):
        whole = path.read_bytes()
        bits = range(8 * len(whole)) if path.name != "steps" else chosen.sample(range(8 * len(whole)), 600)
        for bit in bits:
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(ReceiptWrong):
                verify(folder)
        path.write_bytes(whole)
    verify(folder)
    assert [line["ranks"] for line in lines(folder / "sessions")] == [2]


def test_a_million_steps_are_verified_in_seconds_without_torch(folder):
    hashed, parts = hashlib.sha256((folder / "head").read_bytes()).digest(), []
    body = bytearray(record(0).to_bytes())
    for step in range(1_000_000):
        struct.pack_into("<Q", body, 8, step)
        hashed = link(hashed, body)
        parts += (bytes(body), hashed)
    (folder / "steps").write_bytes(b"".join(parts))
    script = (
        "import sys, time; from pathlib import Path; from dure.proof.verify_receipt import verify\n"
        "found = verify(Path(sys.argv[1])); assert found.steps == 1_000_000\n"
        "assert 'torch' not in sys.modules; print(time.process_time())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 10
    assert ReceiptFolder.of(folder).head["shards"] == 8
