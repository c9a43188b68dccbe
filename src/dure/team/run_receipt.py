"""A run's receipt while it trains: rank 0 writes it, with what all ranks know of each step. Of jobs and of scripts."""

from __future__ import annotations

import json
import platform
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dure import __version__
from dure.base.errors import ReceiptWrong
from dure.base.files import make_own_folder, read_at_most, write_whole
from dure.base.in_image import digest_inside
from dure.base.run_folder import RunFolder
from dure.checkpoint.capture import Capture
from dure.checkpoint.find import refuse_other_recipe
from dure.checkpoint.script_state import Extra
from dure.checkpoint.state import MODEL, Schedule, Share
from dure.device.fingerprint import named_weights, raw_bytes
from dure.proof import receipt, receipt_lines
from dure.proof.receipt import Chain, GapRecord, RootRecord, StepRecord, leaf, merkle_root
from dure.proof.recipe import recipe_hash
from dure.step.lockstep import StepResult

_LONGEST_HEAD = 16 << 20
_DOUBLE, _MARK = struct.Struct("<d"), struct.Struct("<Q")

Tensors = Callable[[], Iterator[tuple[str, str, tuple[int, ...], Any]]]
"""(name, dtype, shape, flat tensor) of the whole state, model first; names begin with `model/` or `optimizer/`."""


@dataclass(frozen=True)
class Roots:
    """Of a state: Merkle roots, and the model's leaves by name."""

    weights: bytes
    optimizer: bytes
    leaves: dict[str, str]


class RunReceipt:
    """On rank 0 of ranks that train one model; elsewhere every call does nothing."""

    def __init__(
        self,
        folder: RunFolder,
        head: dict[str, Any],
        start: int,
        tensors: Tensors,
        note: Callable[[str], None],
        *,
        left_out: Collection[str],
        is_writer: bool,
        session: dict[str, Any],
    ) -> None:
        """`head` is what the run depends on, of which the first session's counts; `start` the next step; `left_out` the
        names of buffers that a file of weights does not have."""
        self._left_out = left_out
        self._folder, self._tensors, self._note = folder, tensors, note
        self._chain: Chain | None = None
        self._known: tuple[int, Roots] | None = None
        self._proved_until = 0
        if not is_writer:
            return
        try:
            make_own_folder(folder.receipt)
            if not folder.receipt_head.exists():
                write_whole(folder.receipt_head, json.dumps(head, sort_keys=True))
            text = read_at_most(folder.receipt_head, _LONGEST_HEAD)
            self._head = json.loads(text)
            refuse_other_recipe(self._head, head["recipe_words"], str(folder.receipt))
            self._proved_until = self._states_proved_until()
            self._chain = Chain(folder.receipt_steps, text)
            self._chain.go_on_at(start)
            receipt_lines.append(folder.receipt / "sessions", {**session, "start": start, "at": _now()})
        except OSError as error:
            self._give_up(error)
        except (ValueError, KeyError):
            raise ReceiptWrong(
                f"{folder.receipt_head} is no JSON: it was damaged; `dure verify {folder.path}`"
            ) from None

    def after_step(self, step: int, passes: Sequence[StepResult]) -> None:
        """Record a step, after its update; raises where it was recorded before and gives other bits now.

        `passes` are its forward and backward passes: one, but for scripts that train several models.
        """
        chain = self._chain
        if chain is None or not passes or passes[-1].marks is None:
            return
        there = chain.next_recorded()
        if isinstance(there, GapRecord):
            if step < there.end:
                return
            chain.add(there)
        losses = [b"".join(_DOUBLE.pack(loss) for loss in shard) for shard in _by_shard(_losses, passes)]
        gradients = [b"".join(_MARK.pack(mark) for mark in shard) for shard in _by_shard(_gradients, passes)]
        record = StepRecord(
            step,
            passes[-1].samples,
            passes[-1].loss,
            passes[-1].mark,
            passes[-1].marks.content,
            receipt.lanes_of(losses, 4),
            receipt.lanes_of(gradients, 8),
        )
        try:
            found = chain.add(record)
            if isinstance(found, StepRecord):
                what = record.differs_from(found, len(losses)) or "another step"
                self._refuse_if_proved(step, what)
                chain.replace(record)
                self._note(
                    f"step {step} gives {what} than before the restart: a replica was wrong then, and no state "
                    "of it was kept; the receipt has the step as it is now"
                )
            self._root_if_due(chain, step + 1)
        except OSError as error:
            self._give_up(error)

    def _refuse_if_proved(self, step: int, what: str) -> None:
        """Replicas that were proved the same after a step had computed it alike: then other bits now are no repair."""
        if step < self._proved_until:
            raise ReceiptWrong(
                f"step {step}, computed again, gives {what} than the receipt has recorded; a machine computes wrongly, "
                "or something changed that the recipe does not know"
            )

    def _states_proved_until(self) -> int:
        """How many steps the newest state has that was saved, which all ranks had proved the same; all in a replay."""
        if self._folder.receipt_replay.exists():
            return sys.maxsize
        lines = receipt_lines.lines(self._folder.receipt / "checkpoints")
        return max((int(line["step"]) for line in lines), default=0)

    def saving(self, steps_done: int) -> None:
        """A checkpoint of this state is about to be saved: record its roots beside the chain."""
        chain = self._chain
        if chain is None:
            return
        try:
            roots = self._roots(steps_done)
            chain.sync()
            receipt_lines.append(self._folder.receipt / "checkpoints", self._line(chain, steps_done, roots))
        except OSError as error:
            self._give_up(error)

    def end(self, steps_done: int) -> None:
        """The run is done: its last root, and every tensor's hash."""
        chain = self._chain
        if chain is None:
            return
        try:
            roots = self._roots(steps_done)
            if not self._has_root(chain, steps_done):
                self._add_root(chain, steps_done)
            chain.sync()
            line = {
                **self._line(chain, steps_done, roots),
                "leaves": roots.leaves,
                "left_out": sorted(self._left_out),
            }
            receipt_lines.append(self._folder.receipt / "checkpoints", line)
            chain.close()
            self._chain = None
        except OSError as error:
            self._give_up(error)

    def _root_if_due(self, chain: Chain, steps_done: int) -> None:
        there, every = chain.next_recorded(), int(self._head["root_every"])
        if (every and steps_done % every == 0) or isinstance(there, RootRecord):
            self._add_root(chain, steps_done)

    def _add_root(self, chain: Chain, steps_done: int) -> None:
        roots = self._roots(steps_done)
        record = RootRecord(steps_done, roots.weights, roots.optimizer)
        found = chain.add(record)
        if isinstance(found, RootRecord):
            if found.weights == record.weights and receipt.NO_ROOT in (found.optimizer, record.optimizer):
                return  # a sharded optimizer, which no rank has whole, has none
            what = "weights" if found.weights != record.weights else "optimizer state"
            raise ReceiptWrong(
                f"after step {steps_done - 1}, computed again, the {what} is not what the receipt has recorded; a "
                "machine computes or remembers wrongly"
            )

    def _has_root(self, chain: Chain, steps_done: int) -> bool:
        last = chain.last_recorded()
        return isinstance(last, RootRecord) and last.step == steps_done

    def _roots(self, steps_done: int) -> Roots:
        if self._known is None or self._known[0] != steps_done:
            leaves = {
                name: leaf(name, dtype, shape, [raw_bytes(values)])
                for name, dtype, shape, values in self._tensors()
            }
            model = {name: found for name, found in leaves.items() if name.startswith("model/")}
            rest = [found for name, found in leaves.items() if name not in model]
            roots = Roots(
                merkle_root(list(model.values())),
                merkle_root(rest),
                {name: found.hex() for name, found in model.items()},
            )
            self._known = (steps_done, roots)
        return self._known[1]

    def _line(self, chain: Chain, steps_done: int, roots: Roots) -> dict[str, Any]:
        return {
            "step": steps_done,
            "records": chain.count,
            "chain": chain.last.hex(),
            "weights": roots.weights.hex(),
            "optimizer": roots.optimizer.hex(),
            "at": _now(),
        }

    def _give_up(self, error: OSError) -> None:
        """A run is worth more than its receipt; what is missing shows as a gap."""
        self._note(f"the receipt ends here, as it cannot be written: {error.strerror}")
        self._chain = None


def head_of(recipe: dict[str, Any], shards: int, root_every: int) -> dict[str, Any]:
    """What a receipt begins with."""
    return {
        "format": receipt.FORMAT,
        "recipe": recipe_hash(recipe),
        "recipe_words": recipe,
        "versions": {"dure": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "image": digest_inside(),
        "shards": shards,
        "root_every": root_every,
    }


def _losses(result: StepResult) -> Sequence[float]:
    return result.totals.losses


def _gradients(result: StepResult) -> Sequence[int]:
    return result.marks.gradients if result.marks is not None else [0] * len(result.totals.losses)


def _by_shard(values: Callable[[StepResult], Sequence[Any]], passes: Sequence[StepResult]) -> Iterator[Any]:
    """What all passes have of each shard."""
    return zip(*map(values, passes), strict=True)


def state_tensors(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule | None,
    extra: Extra | None = None,
    *,
    sharded: bool,
) -> Iterator[tuple[str, str, tuple[int, ...], torch.Tensor]]:
    """All tensors of a state, named and flattened as in checkpoints; of a sharded optimizer, which no rank has whole,
    none."""
    if sharded:
        for name, tensor in named_weights(module):
            yield MODEL + name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor
        return
    for piece in Capture(module, optimizer, schedule, extra).take({"step": 0}, Share(0, 1)).pieces:
        span = piece.span
        yield span.name, str(span.dtype).removeprefix("torch."), span.shape, piece.values


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
