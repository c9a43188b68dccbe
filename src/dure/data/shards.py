"""Which sample goes to which shard, and which shard to which rank. Pure maths.

Every global batch is cut into `shards` parts; samples fill them from shard 0 up, so that their sizes
differ by one at most and a short last batch leaves the last shards empty. Each epoch uses every sample
exactly once: nothing is padded, nothing dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SplitKind = Literal["interleaved", "blocks"]


@dataclass(frozen=True)
class Split:
    """How an epoch's `samples` positions are cut into steps and shards."""

    samples: int
    global_batch: int
    shards: int
    kind: SplitKind = "interleaved"
    drop_last: bool = False
    """Whether an epoch ends with its last full batch."""

    @property
    def steps(self) -> int:
        """Steps in one epoch; the last one may be smaller."""
        full, rest = divmod(self.samples, self.global_batch)
        return full + bool(rest and not self.drop_last)

    @property
    def samples_of_epoch(self) -> int:
        """Samples that an epoch uses."""
        return self.steps * self.global_batch if self.drop_last else self.samples

    def batch_size(self, step: int) -> int:
        """Samples in this step of the epoch."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    def active(self, step: int) -> int:
        """Shards with at least one sample; they are the first ones."""
        return min(self.shards, self.batch_size(step))

    def count(self, step: int, shard: int) -> int:
        """Samples of this shard in this step."""
        return _part(self.batch_size(step), self.shards, shard)

    def positions(self, step: int, shard: int) -> range:
        """Positions, in the epoch's order, of this shard's samples in this step."""
        if self.kind == "interleaved":
            start = step * self.global_batch
            return range(start + shard, start + self.batch_size(step), self.shards)
        before = step * _part(self.global_batch, self.shards, shard)
        start = self._before(shard) + before
        return range(start, start + self.count(step, shard))

    def _before(self, shard: int) -> int:
        """Samples of all shards before this one in the whole epoch."""
        full, rest = divmod(self.samples_of_epoch, self.global_batch)
        return full * _parts_before(self.global_batch, self.shards, shard) + _parts_before(
            rest, self.shards, shard
        )


def shards_of_rank(rank: int, ranks: int, shards: int) -> range:
    """The neighbouring shards that a rank computes; ranks' loads differ by one shard at most."""
    return range(rank * shards // ranks, (rank + 1) * shards // ranks)


def rank_of_shard(shard: int, ranks: int, shards: int) -> int:
    """The rank that computes this shard."""
    return next(rank for rank in range(ranks) if shard in shards_of_rank(rank, ranks, shards))


def parts_of(positions: range, parts: int) -> list[range]:
    """A shard's samples cut into at most `parts` micro-batches, sizes differing by one, none empty."""
    found, start = [], 0
    for part in range(parts):
        size = _part(len(positions), parts, part)
        if size:
            found.append(positions[start : start + size])
        start += size
    return found


def _part(whole: int, parts: int, index: int) -> int:
    """The size of part `index` when `whole` things fill `parts` places from 0 up."""
    return whole // parts + (index < whole % parts)


def _parts_before(whole: int, parts: int, index: int) -> int:
    """The size of all parts before `index`."""
    return whole // parts * index + min(index, whole % parts)


def ledger_mark(sample: int) -> int:
    """A 64-bit mark of one sample id. Marks add up (mod 2⁶⁴) to a hash of a *multiset* of samples, so that
    ranks can be added in any order and one repeated or missing sample shows."""
    mark = (sample + 0x9E3779B97F4A7C15) & _MASK
    mark = ((mark ^ (mark >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mark = ((mark ^ (mark >> 27)) * 0x94D049BB133111EB) & _MASK
    return mark ^ (mark >> 31)


def sample_of_mark(mark: int) -> int:
    """The inverse of `ledger_mark`."""
    mark ^= mark >> 31 ^ mark >> 62
    mark = mark * pow(0x94D049BB133111EB, -1, 1 << 64) & _MASK
    mark ^= mark >> 27 ^ mark >> 54
    mark = mark * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & _MASK
    mark ^= mark >> 30 ^ mark >> 60
    return (mark - 0x9E3779B97F4A7C15) & _MASK


_MASK = (1 << 64) - 1
