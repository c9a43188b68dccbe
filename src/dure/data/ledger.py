"""Which samples were really used: a ledger that is folded step by step, and kept in the run's states.

Every step, all ranks learn how many samples it had and the sum of their marks (`shards.ledger_mark`). Added up over an
epoch these are a hash of the multiset of its samples, whatever the ranks and however often the run was resumed: a state
holds the ledger of exactly the steps that are in it. So the verdict at the end costs the same for any number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dure.data.shards import sample_of_mark

if TYPE_CHECKING:
    import numpy

_MASK = (1 << 64) - 1
_AT_ONCE = 1 << 20
_MOST_ROWS = 64
"""Epochs that differ from the one before are counted apart, up to so many: if all is well there is one row."""
_MOST_NAMED = 10_000_000
"""Samples that are looked through for the one that came twice."""


@dataclass(frozen=True)
class Ledger:
    """The verdict."""

    epochs: int
    """Complete epochs that were checked."""
    exactly_once: bool | None
    """Every sample once in each of them; None when there is no complete epoch to check."""
    repeated: tuple[int, ...] = ()
    """Some samples that came more than once in an epoch, where they can be told."""
    missing: tuple[int, ...] = ()
    """Some samples that never came in a complete epoch, where they can be told."""
    eval_exactly_once: bool | None = None
    """Every evaluation sample once, in every evaluation."""


@dataclass
class Row:
    """Epochs, one after the other, that had this count and mark."""

    count: int
    mark: int
    times: int = 1


@dataclass
class SampleLedger:
    """What the steps of a run used, as far as it has come."""

    uses_all: bool = True
    """Whether an epoch is meant to use all samples; with `data.drop_last` it may not, and is not checked."""
    alone: bool = False
    """Whether these are the samples of one rank that trains alone."""
    whole: bool = True
    """Whether the epoch under way was followed from its start."""
    count: int = 0
    mark: int = 0
    """Of the epoch under way."""
    epochs: list[Row] = field(default_factory=list)
    """Complete ones."""
    evaluations: list[Row] = field(default_factory=list)
    eval_samples: int = 0

    def add(self, count: int, mark: int, *, ends_epoch: bool) -> None:
        """A step's samples."""
        self.count += count
        self.mark = (self.mark + mark) & _MASK
        if ends_epoch:
            if self.whole and self.uses_all:
                self._append(self.epochs, Row(self.count, self.mark))
            self.whole, self.count, self.mark = True, 0, 0

    def add_evaluation(self, count: int, mark: int, samples: int) -> None:
        """An evaluation's samples, of which there are so many in all."""
        self.eval_samples = samples
        self._append(self.evaluations, Row(count, mark))

    def to_plain(self) -> dict[str, Any]:
        """For a state's facts, and for the way to the launcher."""
        return {
            "under_way": [self.whole, self.count, self.mark],
            "epochs": [[row.count, row.mark, row.times] for row in self.epochs],
            "evaluations": [[row.count, row.mark, row.times] for row in self.evaluations],
            "eval_samples": self.eval_samples,
        }

    def go_on_from(self, told: dict[str, Any] | None) -> None:
        """Take over what a state holds; nothing, in one of an older version: the epoch under way is not checked."""
        if told is None:
            self.whole, self.count, self.mark = False, 0, 0
            return
        self.whole, self.count, self.mark = told["under_way"]
        self.epochs, self.evaluations = (
            [Row(*row) for row in told[name]] for name in ("epochs", "evaluations")
        )
        self.eval_samples = told["eval_samples"]

    def _append(self, rows: list[Row], row: Row) -> None:
        if rows and (rows[-1].count, rows[-1].mark) == (row.count, row.mark):
            rows[-1].times += 1
        elif self.alone or len(rows) < _MOST_ROWS:
            rows.append(row)
        else:  # something is wrong anyhow
            rows[-1].times += 1


def verdict(told: Sequence[dict[str, Any]], samples: int, *, together: bool) -> Ledger:
    """What the ranks' ledgers (`to_plain`) say: all the same, or with `together` off each of one rank alone."""
    epochs = [Row(*row) for row in told[0]["epochs"]] if together else _added([one["epochs"] for one in told])
    whole = mark_of_all(samples)
    wrong = [row for row in epochs if (row.count, row.mark) != (samples, whole)]
    repeated, missing = _named(wrong[0], samples, whole) if wrong else ((), ())
    judged = None
    if together and told[0]["evaluations"]:
        expected = int(told[0]["eval_samples"])
        right = [expected, mark_of_all(expected)]
        judged = all(row[:2] == right for row in told[0]["evaluations"])
    return Ledger(
        epochs=sum(row.times for row in epochs),
        exactly_once=not wrong if epochs else None,
        repeated=repeated,
        missing=missing,
        eval_exactly_once=judged,
    )


def marks_of(samples: Sequence[int] | range) -> numpy.ndarray[Any, Any]:
    """`ledger_mark` of many samples at once."""
    import numpy

    if isinstance(samples, range):
        numbers = numpy.arange(samples.start, samples.stop, dtype=numpy.uint64)
    else:
        numbers = numpy.array(samples, dtype=numpy.uint64)
    with numpy.errstate(over="ignore"):
        marks = numbers + numpy.uint64(0x9E3779B97F4A7C15)
        marks = (marks ^ (marks >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        marks = (marks ^ (marks >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return marks ^ (marks >> numpy.uint64(31))


def mark_of(samples: Sequence[int] | range) -> int:
    """The sum of `ledger_mark` over many samples; it is on the training thread's way."""
    return int(marks_of(samples).sum())


def mark_of_all(samples: int) -> int:
    """The sum of `ledger_mark` over samples 0, 1, … ."""
    starts = range(0, samples, _AT_ONCE)
    return sum(mark_of(range(start, min(start + _AT_ONCE, samples))) for start in starts) & _MASK


def _added(by_rank: Sequence[Sequence[Sequence[int]]]) -> list[Row]:
    """Epochs over ranks: what each of them used, added up."""
    spread = [[(count, mark) for count, mark, times in rows for _ in range(times)] for rows in by_rank]
    return [
        Row(sum(count for count, _ in epoch), sum(mark for _, mark in epoch) & _MASK)
        for epoch in zip(*spread, strict=False)
    ]


def _named(row: Row, samples: int, whole: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sample that came twice, and the one that never came, when there is one at most of each: a mark tells its
    sample."""
    difference, extra = (row.mark - whole) & _MASK, row.count - samples
    if extra == 1:
        repeated = sample_of_mark(difference)
        return ((repeated,), ()) if repeated < samples else ((), ())
    if extra == -1:
        missing = sample_of_mark(-difference & _MASK)
        return ((), (missing,)) if missing < samples else ((), ())
    if extra != 0 or samples > _MOST_NAMED:
        return (), ()
    import numpy

    marks = marks_of(range(samples))
    order = numpy.argsort(marks)
    with numpy.errstate(over="ignore"):
        wanted = marks - numpy.uint64(difference)
    at = numpy.minimum(numpy.searchsorted(marks[order], wanted), samples - 1)
    pairs = numpy.flatnonzero(marks[order][at] == wanted)
    if len(pairs) != 1:
        return (), ()
    return (int(pairs[0]),), (int(order[at[pairs[0]]]),)
