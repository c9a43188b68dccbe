"""Run a job undisturbed, then once for every fault at a random step, and compare the weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dure.base.errors import DureError
from dure.base.run_folder import RunFolder
from dure.observe.events import CheckpointSaved, Stepped, TeamFormed
from dure.tools.drill.attempt import Attempt
from dure.tools.drill.faults import Injected, InjectedFault, checkpoints, chosen

_CHECKPOINTS = 10
"""In one run of the job."""


@dataclass(frozen=True)
class DrillResult:
    """What a fault did to the run."""

    name: str
    step: int | None
    """In which it happened."""
    same_bits: bool | None
    """None: it could not be tried, see `trouble`."""
    noticed_seconds: float | None
    """Until the launcher knew, or with `disk-full` until the user was told; None: there was nothing to notice."""
    resumed_seconds: float | None
    """Until the next step was done by all ranks."""
    steps_repeated: int | None
    trouble: str | None = None

    def as_json(self) -> dict[str, Any]:
        """As plain values; the trouble only where there was some."""
        plain = asdict(self)
        return plain if self.trouble is not None else {k: v for k, v in plain.items() if k != "trouble"}


def drill(
    job: Path,
    faults: str,
    *,
    folder: Path,
    ranks: int,
    seed: int = 0,
    settings: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Try each of `faults` (names, with commas) on the job; the runs are kept in `folder`.

    The same seed disturbs the same steps. A run that ends otherwise than it should is told in its outcome.
    """
    wanted = chosen(faults)
    base = [part for setting in settings for part in ("--set", setting)]
    say("undisturbed")
    undisturbed = Attempt(job, RunFolder(folder / "undisturbed"), ranks, base)
    undisturbed.start()
    try:
        summary = undisturbed.summary()
    finally:
        undisturbed.end()
    steps, sha256 = int(summary["steps"]), str(summary["weights_sha256"])
    if steps < 4:
        raise DureError(f"the job has {steps} steps; a drill needs 4 or more to disturb one in the middle")
    base += ["--set", f"checkpoint.every_steps={max(1, steps // _CHECKPOINTS)}"]
    outcomes = []
    for name, fault in wanted.items():
        dice = random.Random(f"{seed} {name}")
        step = dice.randrange(steps // 2, steps - 1)
        say(f"{name} at step {step}")
        attempt = Attempt(job, RunFolder(folder / name), ranks, [*base, *fault.arguments])
        outcomes.append(_tried(name, fault, attempt, step, dice, sha256))
    return {"weights_sha256": sha256, "faults": [outcome.as_json() for outcome in outcomes]}


def _tried(
    name: str, fault: InjectedFault, attempt: Attempt, step: int, dice: random.Random, sha256: str
) -> DrillResult:
    place = checkpoints(attempt.folder.path)
    if fault.prepare is not None:
        try:
            fault.prepare(place)
        except DureError as error:
            return DrillResult(name, None, None, None, None, None, str(error))
    try:
        attempt.start()
        injected = fault.inject(attempt, step, dice)
        summary = attempt.summary()
    except DureError as error:
        return DrillResult(name, step, False, None, None, None, str(error))
    finally:
        attempt.end()
        if fault.clear is not None:
            fault.clear(place)
    return _outcome(name, fault, attempt, injected, summary["weights_sha256"] == sha256)


def _outcome(
    name: str, fault: InjectedFault, attempt: Attempt, injected: Injected, same_bits: bool
) -> DrillResult:
    noticed_at = injected.noticed_at or attempt.noticed_at(injected.at)
    later = [record for record in attempt.events() if record.at > injected.at]
    if fault.restarts:
        formed = next((at for at, record in enumerate(later) if isinstance(record.event, TeamFormed)), None)
        if formed is None:
            return DrillResult(name, injected.step, False, None, None, None, "the team never started again")
        later = later[formed:]
    elif noticed_at is None:
        lost = (
            record.at
            for record in later
            if isinstance(record.event, CheckpointSaved) and record.event.trouble is not None
        )
        noticed_at = next(lost, None)
    first = next(
        ((record.at, record.event.step) for record in later if isinstance(record.event, Stepped)), None
    )
    repeated = max(0, injected.step - first[1]) if first is not None and fault.restarts else 0
    return DrillResult(
        name,
        injected.step,
        same_bits,
        None if noticed_at is None else round(noticed_at - injected.at, 3),
        None if first is None else round(first[0] - injected.at, 3),
        repeated,
    )


def in_words(figures: dict[str, Any]) -> str:
    """The figures as a table for people."""
    head = ("fault", "at step", "same bits", "noticed after", "back to work after", "steps repeated")
    rows = [head]
    for fault in figures["faults"]:
        same = {True: "yes", False: "NO", None: "not tried"}[fault["same_bits"]]
        rows.append(
            (
                fault["name"],
                _shown(fault["step"]),
                same,
                _seconds(fault["noticed_seconds"]),
                _seconds(fault["resumed_seconds"]),
                _shown(fault["steps_repeated"]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"{fault['name']}: {fault['trouble']}" for fault in figures["faults"] if "trouble" in fault]
    return "\n".join([*(line.rstrip() for line in lines), f"undisturbed: {figures['weights_sha256']}"])


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
