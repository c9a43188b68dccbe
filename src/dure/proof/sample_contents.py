"""Whether samples are what they were when they were first read: in an earlier epoch, or before a resume.

Every rank hashes the samples that it reads. At the end of an epoch all ranks learn of all of them, and rank 0 keeps the
table in the run's folder. Where samples are augmented their bits differ from epoch to epoch; then a few per epoch are
read again as they were read first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dure.base.errors import UsageError
from dure.base.files import make_own_folder, open_plain, write_whole
from dure.comm.group import Group
from dure.data.content import UNKNOWN
from dure.proof.receipt_lines import canonical

MOST_SAMPLES = 1 << 22
"""Samples with higher numbers are not followed: the table would be large."""
_AGAIN = 4
"""Augmented samples that a rank reads again per epoch."""
_FORMAT = 1

Read = Callable[[int, int], int]
"""(epoch, sample) → content, as it is read now."""


class SampleContents:
    """The contents of all samples, as far as any rank has read them."""

    def __init__(self, path: Path, samples: int, group: Group, read: Read) -> None:
        """Takes over what earlier sessions of the run wrote to `path`; a collective call."""
        self._path = path
        self._group = group
        self._read = read
        self._count = min(samples, MOST_SAMPLES)
        self._head = {"format": _FORMAT, "samples": self._count}
        table = torch.zeros(2, self._count, dtype=torch.int64)
        known = self._kept() if group.rank == 0 else None
        if known is not None:
            table.copy_(known)
        group.from_leader(table, "sharing what samples contained")
        self._contents, self._epochs = table[0], table[1]
        self._seen = torch.zeros(2, self._count, dtype=torch.int64)
        self._varies = False
        self._left_to_read_again = _AGAIN

    def check(self, epoch: int, ids: Sequence[int], contents: Sequence[int]) -> None:
        """Compare a batch's samples with what they were; raises with the first that is another now."""
        chosen = [at for at, sample in enumerate(ids) if sample < self._count]
        places = torch.tensor([ids[at] for at in chosen], dtype=torch.int64)
        now = torch.tensor([_signed(contents[at]) for at in chosen], dtype=torch.int64)
        self._seen[0, places], self._seen[1, places] = now, epoch
        before, epochs = self._contents[places], self._epochs[places]
        differing = (before != UNKNOWN) & (before != now)
        if not bool(differing.any()):
            return
        for at in differing.nonzero().flatten().tolist():
            was, then = int(before[at]), int(epochs[at])
            if self._varies and then != epoch:
                if self._left_to_read_again == 0:
                    return
                self._left_to_read_again -= 1
            if then == epoch or _signed(self._read(then, int(places[at]))) != was:
                raise UsageError(
                    f"sample {int(places[at])} of the data is not what it was when this run read it in epoch {then}: "
                    "the data was changed, so the bits would be of no recipe. Restore it, or start anew with --fresh "
                    "(nothing is deleted)"
                )
            self._varies = True

    def end_epoch(self) -> None:
        """All ranks learn what the others read, and rank 0 keeps it. A collective call."""
        if not self._count:
            return
        self._group.sum(self._seen, "sharing what samples contain")
        new = (self._contents == UNKNOWN) & (self._seen[0] != UNKNOWN)
        self._contents[new], self._epochs[new] = self._seen[0][new], self._seen[1][new]
        self._seen.zero_()
        self._left_to_read_again = _AGAIN
        if self._group.rank == 0 and bool(new.any()):
            table = torch.stack([self._contents, self._epochs]).numpy().tobytes()
            head = canonical({**self._head, "sha256": hashlib.sha256(table).hexdigest()}) + b"\n"
            with contextlib.suppress(OSError):  # a full disk: later sessions compare with less
                make_own_folder(self._path.parent)
                write_whole(self._path, [head, table])

    def _kept(self) -> torch.Tensor | None:
        try:
            with open(open_plain(self._path), "rb") as file:
                head = json.loads(file.readline(400))
                body = file.read(16 * self._count + 1)
        except (OSError, ValueError):
            return None
        if head != {**self._head, "sha256": hashlib.sha256(body).hexdigest()}:
            return None
        return torch.frombuffer(bytearray(body), dtype=torch.int64).view(2, self._count)


def _signed(content: int) -> int:
    """The same 64 bits, as torch's int64 has them."""
    return content - (1 << 64) if content >= 1 << 63 else content
