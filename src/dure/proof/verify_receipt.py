"""Check a receipt, and checkpoints and weights against it: offline, without torch, seconds for a million steps."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dure.base.errors import ReceiptWrong, UsageError
from dure.base.files import open_plain, read_at_most
from dure.base.run_folder import RunFolder
from dure.proof import stored_tensors
from dure.proof.receipt import (
    BODY,
    FORMAT,
    NO_ROOT,
    RECORD,
    GapRecord,
    Kind,
    RootRecord,
    StepRecord,
    merkle_root,
    parse,
)
from dure.proof.receipt_lines import canonical, lines
from dure.proof.sign_receipt import check_signature

_AT = struct.Struct("<I4xQ")
_LONGEST_HEAD = 16 << 20
_LONGEST_SCRIPT = 1 << 20


@dataclass
class Verified:
    """What a receipt says, all of which was found to be right."""

    recipe: str
    steps: int
    records: int
    chain: str
    gaps: list[tuple[int, int]]
    sessions: int
    weights: str | None
    """Root of the weights in the end, if the run has ended."""
    loss: float | None
    signed_by: str | None = None
    checkpoints: list[str] = field(default_factory=list)
    weights_file: str | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {"verified": True, **vars(self)}


@dataclass(frozen=True)
class ReceiptFolder:
    """A receipt: the folder `receipt` of a run, or a copy of it."""

    path: Path

    @classmethod
    def of(cls, path: Path) -> ReceiptFolder:
        """Of a run's folder, or of the receipt itself."""
        for folder in (path / "receipt", path, *_beside_checkpoints(path)):
            if (folder / "head").is_file():
                return cls(folder)
        raise UsageError(
            f"{path} has no receipt; give a run's folder (`dure train --run-dir`) or its `receipt`; of a script that "
            "calls team.checkpoint, its run's folder or that of its checkpoints"
        )

    @property
    def head_bytes(self) -> bytes:
        """The chain begins with its hash."""
        return read_at_most(self.path / "head", _LONGEST_HEAD)

    @property
    def head(self) -> dict[str, Any]:
        """What the run depends on."""
        try:
            head = json.loads(self.head_bytes)
            if canonical(head["recipe_words"]) and int(head["format"]) <= FORMAT:
                return dict(head)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ReceiptWrong(f"{self.path / 'head'} was changed: it cannot be read") from None
        raise ReceiptWrong(
            f"{self.path / 'head'} has the format {head['format']}: a newer dure wrote it (update this one), or it was "
            "changed"
        )

    def records(self) -> list[StepRecord | RootRecord | GapRecord]:
        """All of them; for receipts that were verified."""
        with open(open_plain(self.path / "steps"), "rb") as file:
            whole = file.read()
        return [parse(whole[at : at + BODY]) for at in range(0, len(whole) // RECORD * RECORD, RECORD)]


def _beside_checkpoints(run: Path) -> Iterator[Path]:
    """Where a script has its receipt that keeps its checkpoints in a folder of its own."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        place = str(json.loads(read_at_most(RunFolder(run).script, _LONGEST_SCRIPT))["checkpoints"])
        if "://" not in place:
            yield run / place / "receipt"


def verify(path: Path, *, weights: Path | None = None, key: Path | None = None) -> Verified:
    """Check everything there is; ReceiptWrong with the first thing that is not as it was recorded."""
    folder = ReceiptFolder.of(path)
    found, roots, hashes = _check_chain(folder)
    told = list(lines(folder.path / "checkpoints"))
    for line in told:
        if hashes(int(line["records"])) != line["chain"]:
            raise ReceiptWrong(
                f"{folder.path / 'checkpoints'}: the line of step {line['step']} is of another chain"
            )
        root = roots.get(int(line["step"]))
        if root is not None and not _same_roots(root, line):
            raise ReceiptWrong(
                f"{folder.path / 'checkpoints'}: step {line['step']} has other roots than the chain"
            )
    found.sessions = sum(1 for _ in lines(folder.path / "sessions"))
    found.signed_by = check_signature(folder.path, folder.head_bytes, hashes, key)
    if roots:
        found.weights = roots[max(roots)].weights.hex()
    _check_samples(folder.path / "samples")
    if folder.path.name == "receipt":
        _check_checkpoints(folder.path.parent, told, found)
    if weights is not None:
        _check_weights(weights, told, roots, found)
    return found


def _check_chain(folder: ReceiptFolder) -> tuple[Verified, dict[int, RootRecord], Any]:
    head = folder.head
    words = json.dumps(head["recipe_words"], sort_keys=True).encode()
    if hashlib.sha256(words).hexdigest() != head.get("recipe"):
        raise ReceiptWrong(
            f"{folder.path / 'head'} was changed: its recipe does not have the hash that it says"
        )
    path = folder.path / "steps"
    chain = hashlib.sha256(folder.head_bytes).digest()
    roots: dict[int, RootRecord] = {}
    gaps: list[tuple[int, int]] = []
    expected = count = 0
    last_step: bytes | None = None
    sha256, unpack = hashlib.sha256, _AT.unpack_from
    with open(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while block := file.read(RECORD * 8192):
            for at in range(0, len(block) - RECORD + 1, RECORD):
                body = block[at : at + BODY]
                chain = sha256(chain + body).digest()
                if chain != block[at + BODY : at + RECORD]:
                    raise ReceiptWrong(
                        f"{path}: record {count} (step {unpack(body)[1]}) was changed, or one before it: the chain "
                        "breaks there"
                    )
                count += 1
                kind, step = unpack(body)
                if kind == Kind.STEP and step == expected:
                    expected, last_step = step + 1, body
                    continue
                record = parse(body)
                if isinstance(record, RootRecord) and step == expected:
                    roots[step] = record
                elif isinstance(record, GapRecord) and record.first == expected < record.end:
                    gaps.append((record.first, record.end))
                    expected = record.end
                else:
                    raise ReceiptWrong(
                        f"{path}: record {count - 1} is of step {step}, and {expected} should come"
                    )
    loss = StepRecord.from_bytes(last_step).loss if last_step is not None else None
    found = Verified(head["recipe"], expected, count, chain.hex(), gaps, 0, None, loss)
    if size % RECORD:
        found.notes.append(f"the last {size % RECORD} bytes are a record that a crash cut short")
    if gaps:
        missing = ", ".join(f"{first} to {end - 1}" for first, end in gaps)
        found.notes.append(f"steps {missing} are not in the receipt")

    def hash_after(records: int) -> str:
        """The chain's hash after so many records."""
        if records == 0:
            return hashlib.sha256(folder.head_bytes).hexdigest()
        if not 0 < records <= count:
            return ""
        with open(open_plain(path), "rb") as again:
            again.seek(records * RECORD - (RECORD - BODY))
            return again.read(RECORD - BODY).hex()

    return found, roots, hash_after


def _same_roots(root: RootRecord, line: dict[str, Any]) -> bool:
    """A sharded optimizer has no root, and the same step may have been recorded with one and without."""
    optimizers = {root.optimizer.hex(), line["optimizer"]} - {NO_ROOT.hex()}
    return bool(root.weights.hex() == line["weights"]) and len(optimizers) <= 1


def _check_samples(path: Path) -> None:
    if path.exists():
        with open(open_plain(path), "rb") as file:
            head, body = file.readline(400), file.read()
        try:
            told = json.loads(head)
            right = canonical(told) + b"\n" == head and told["sha256"] == hashlib.sha256(body).hexdigest()
        except (ValueError, KeyError, TypeError):
            right = False
        if not right:
            raise ReceiptWrong(f"{path} was changed: its hash is not that of its content")


def _check_checkpoints(run: Path, told: list[dict[str, Any]], found: Verified) -> None:
    """All that are in the run's own folder."""
    folder = run / "checkpoints"
    if not folder.is_dir() and any(run.glob("step-*")):  # a script's own folder of checkpoints
        folder = run
    if not folder.is_dir():
        found.notes.append(f"no checkpoints were looked at: there is no {folder}")
        return
    by_step = {int(line["step"]): line for line in told}
    for place in sorted(folder.glob("step-*")):
        if not (place / "manifest.json").is_file() or (place / "broken.json").exists():
            continue
        step, leaves = stored_tensors.of_checkpoint(place)
        line = by_step.get(step)
        if line is None:
            raise ReceiptWrong(
                f"{place} is of step {step}, which the receipt has no root for; it was put there since"
            )
        model = [leaf for name, leaf in leaves.items() if name.startswith("model/")]
        rest = [leaf for name, leaf in leaves.items() if not name.startswith("model/")]
        if merkle_root(model).hex() != line["weights"]:
            raise ReceiptWrong(f"{place}: its weights are not those that the receipt has for step {step}")
        if line["optimizer"] != NO_ROOT.hex() and merkle_root(rest).hex() != line["optimizer"]:
            raise ReceiptWrong(f"{place}: its optimizer state is not what the receipt has for step {step}")
        found.checkpoints.append(place.name)


def _check_weights(
    weights: Path, told: list[dict[str, Any]], roots: dict[int, RootRecord], found: Verified
) -> None:
    """A file of weights against the run's last step."""
    last = next((line for line in reversed(told) if "leaves" in line), None)
    if last is None:
        raise UsageError(
            "the run has not ended, so its receipt has no hashes of single tensors to compare with"
        )
    known = {name: bytes.fromhex(leaf) for name, leaf in last["leaves"].items()}
    root = roots.get(int(last["step"]))
    if root is None or merkle_root(list(known.values())) != root.weights:
        raise ReceiptWrong("the receipt's list of tensors does not have the root that its chain says")
    leaves = stored_tensors.of_safetensors(weights, "model/")
    for name, leaf in leaves.items():
        if name not in known:
            raise ReceiptWrong(f"{weights}: {name.removeprefix('model/')} is no tensor of this run's model")
        if known[name] != leaf:
            raise ReceiptWrong(
                f"{weights}: {name.removeprefix('model/')} is not what it was after step {int(last['step']) - 1}"
            )
    missing = [name.removeprefix("model/") for name in known if name not in leaves]
    left_out = set(last.get("left_out", []))
    lost = [name for name in missing if name not in left_out]
    if lost:
        raise ReceiptWrong(f"{weights} lacks {lost[0]} ({len(lost)} tensors in all) of this run's model")
    found.weights_file = str(weights)
