"""The first difference between two runs' receipts, in order of execution. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dure.proof.receipt import NO_ROOT, RootRecord, StepRecord
from dure.proof.receipt_lines import lines
from dure.proof.verify_receipt import ReceiptFolder, verify


@dataclass(frozen=True)
class State:
    """A run's state after so many steps, as hashes."""

    step: int
    tensors: dict[str, str]
    """Of the model, by name."""
    optimizer: str
    """Root over the optimizer's."""

    def differs_from(self, other: State) -> list[str]:
        """The tensors that differ; of the optimizer's all count as one."""
        names = {**self.tensors, **other.tensors}
        found = [name for name in names if self.tensors.get(name) != other.tensors.get(name)]
        if not found and len({self.optimizer, other.optimizer} - {NO_ROOT.hex()}) > 1:
            found.append("the optimizer state")
        return found


@dataclass
class Difference:
    """Between two runs; all empty when there is none."""

    recipe: list[str] = field(default_factory=list)
    """Lines of the recipe that differ."""
    step: int | None = None
    """The first whose records differ; for weights, the step after which they do."""
    what: str = ""
    tensors: list[str] = field(default_factory=list)
    """Those that differ in the first states that could be compared by tensor."""
    tensors_after: int = 0
    """After how many steps."""
    same_until: int = 0
    """The newest state that both are known to share: after so many steps."""
    replays: int = 0
    """How often a run was computed again, in parts, to find this."""
    wrong: str = ""
    """Which of the two is not what its recipe gives, and where, if a replay has shown that."""
    not_replayed: str = ""
    """Why no more than the receipts could be compared."""
    steps: tuple[int, int] = (0, 0)
    """How many each has."""

    @property
    def same(self) -> bool:
        """Whether there is none, as far as both runs have come."""
        return not self.recipe and self.step is None and not self.tensors


def compare(one: Path, other: Path) -> Difference:
    """Verify both receipts, then compare them."""
    verified = [verify(path) for path in (one, other)]
    folders = [ReceiptFolder.of(path) for path in (one, other)]
    heads = [folder.head for folder in folders]
    found = Difference(
        recipe=sorted(_differences(heads[0]["recipe_words"], heads[1]["recipe_words"])),
        steps=(verified[0].steps, verified[1].steps),
    )
    mine, theirs = (folder.records() for folder in folders)
    steps = [{r.step: r for r in records if isinstance(r, StepRecord)} for records in (mine, theirs)]
    roots = [{r.step: r for r in records if isinstance(r, RootRecord)} for records in (mine, theirs)]
    for step in range(min(found.steps)):
        if step in roots[0] and step in roots[1] and (what := _roots_differ(roots[0][step], roots[1][step])):
            found.step, found.what = step - 1, f"{what} after it"
            break
        if step in steps[0] and step in steps[1]:
            what = steps[0][step].differs_from(steps[1][step], int(heads[0]["shards"]))
            if what:
                found.step, found.what = step, what
                break
    known = [_roots_of(folder.path, own) for folder, own in zip(folders, roots, strict=True)]
    last = [last_state(folder.path) for folder in folders]
    if last[0] and last[1] and last[0].step == last[1].step:
        found.tensors, found.tensors_after = last[0].differs_from(last[1]), last[0].step
        if found.tensors and found.step is None:
            found.step, found.what = last[0].step - 1, "the weights after it"
    for step in sorted({*known[0]} & {*known[1]}):
        if found.step is None or step <= found.step:
            if known[0][step] != known[1][step]:
                found.step, found.what = step - 1, "the weights after it"
                break
            found.same_until = step
    return found


def _roots_of(folder: Path, roots: dict[int, RootRecord]) -> dict[int, str]:
    """Root of the weights by step, as far as the receipt has them."""
    told = {int(line["step"]): str(line["weights"]) for line in lines(folder / "checkpoints")}
    return told | {step: record.weights.hex() for step, record in roots.items()}


def _roots_differ(one: RootRecord, other: RootRecord) -> str:
    if one.weights != other.weights:
        return "the weights"
    optimizers = {one.optimizer, other.optimizer} - {NO_ROOT}
    return "the optimizer state" if len(optimizers) > 1 else ""


def last_state(folder: Path) -> State | None:
    """The state with which the run of a receipt has ended; None if it has not."""
    ended = [line for line in lines(folder / "checkpoints") if "leaves" in line]
    if not ended:
        return None
    return State(int(ended[-1]["step"]), dict(ended[-1]["leaves"]), str(ended[-1]["optimizer"]))


def _differences(one: Any, other: Any, key: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {*one, *other}:
            yield from _differences(one.get(name), other.get(name), f"{key}.{name}" if key else str(name))
    elif one != other:
        yield f"{key}: {one!r} and {other!r}"


def in_words(found: Difference) -> Iterator[str]:
    """What to tell people."""
    few = 8
    for line in found.recipe[:few]:
        yield f"recipe   {line}"
    if len(found.recipe) > few:
        yield f"recipe   and {len(found.recipe) - few} lines more"
    if found.step is not None:
        yield f"step     {found.step}: {found.what}"
        if found.replays:
            yield f"         (the same up to step {found.same_until}; {found.replays} replay(s))"
    if found.wrong:
        yield f"wrong    {found.wrong}"
    if found.not_replayed:
        yield f"note     only the receipts were compared: {found.not_replayed}"
    for name in found.tensors[:few]:
        yield f"tensor   {name} (after {found.tensors_after} steps)"
    if len(found.tensors) > few:
        yield f"tensor   and {len(found.tensors) - few} more"
    if found.same:
        one, other = found.steps
        yield "the same" if one == other else f"the same, as far as both have come: {one} and {other} steps"
