"""DDP's communication hook: buckets leave the autograd thread at once and meet in a thread of their own.

DDP keeps its bucketing and its overlap with backward. The hook only hands each bucket over; the
communication thread joins it with this rank's stack of subtrees, exchanges it, and completes the future
that DDP waits for.
"""

# No postponed annotations here: DDP looks at the hook's own.
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import GradBucket

from dure.reduce.exchanger import Exchanger, Pieces, Room, Wire
from dure.reduce.stack import SubtreeStack

CLOSE_SECONDS = 10.0


@dataclass
class StepTotals:
    """What all ranks know about a step once its losses met."""

    losses: list[float]
    """Sum of losses, by shard."""
    counts: list[float]
    """Number of things (samples, tokens) those sums are over, by shard."""
    wishes: list[float]
    """What ranks ask for besides (small whole numbers, as bits), each at its first shard's place."""

    @property
    def count(self) -> float:
        """Over all shards; exact, since the counts are whole numbers."""
        return sum(self.counts)


@dataclass
class StepExchange:
    """One step on its way through the reduce."""

    shape: Pieces
    shard: int | None
    """The shard whose gradients are in the buckets; None on an idle rank."""
    totals: StepTotals
    scale: float = 0.0
    buckets: int = 0
    complete: bool = False
    """All buckets were handed over: DDP saw a gradient for every parameter."""
    handed_over_at: float = field(default_factory=time.perf_counter)
    """When the last bucket left the autograd thread; from then on the rank only waits."""


class GradientExchange:
    """Owns the communication thread. `hook` is what DDP calls."""

    def __init__(
        self,
        exchanger: Exchanger,
        stack: SubtreeStack,
        wire: Wire,
        on_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_waiting` is called when the last bucket is handed over: from then on, the rank waits."""
        self._exchanger = exchanger
        self._on_waiting = on_waiting
        self._stack = stack
        self._wire = wire
        self._step: StepExchange | None = None
        self._failure: BaseException | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
        self._thread.start()

    def begin(self, step: StepExchange) -> None:
        """Start the step's exchange; call it before the backward pass that DDP synchronises."""
        self._step = step
        self._tasks.put(lambda: self._meet_totals(step))

    def hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket to the communication thread and return at once."""
        step = self._step
        assert step is not None, "a synchronised backward pass outside of a step"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        step.buckets += 1
        step.complete = bucket.is_last()
        step.handed_over_at = time.perf_counter()
        index = bucket.index()
        self._tasks.put(lambda: self._exchange(step, index, buffer, gradients, parameters, future))
        if step.complete:
            self._on_waiting()
        return future

    def finish(self) -> None:
        """End the step after its backward pass; raises what went wrong in the communication thread."""
        self._step = None
        self._stack.clear()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the communication thread's own exception, if there is one."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread; a Python hook that outlives its thread could abort the interpreter at exit."""
        self._tasks.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._exchanger.close()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _meet_totals(self, step: StepExchange) -> None:
        totals = step.totals
        try:
            vector = torch.tensor([totals.losses, totals.counts, totals.wishes], dtype=torch.float64)
            self._exchanger.total(vector)
        except BaseException as failure:  # whatever it is, this thread must live to tell it with a bucket
            self._failure = failure
            return
        totals.losses, totals.counts, totals.wishes = vector.tolist()
        step.scale = 1.0 / step.totals.count if step.totals.count else 0.0

    def _exchange(
        self,
        step: StepExchange,
        index: int,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        future: torch.futures.Future[torch.Tensor],
    ) -> None:
        try:
            self.raise_failure()
            room = self._exchanger.room(index, buffer)
            self._join_own(step, room, buffer, gradients, parameters)
            self._exchanger.exchange(room, step.shape, step.scale)
            if room.out.data_ptr() != buffer.data_ptr():
                buffer.copy_(room.out)
            future.set_result(buffer)
        except BaseException as failure:  # whatever it is, the autograd thread must not wait for ever
            self._failure = self._failure or failure
            future.set_exception(RuntimeError(str(failure)))  # type: ignore[arg-type]

    def _join_own(
        self,
        step: StepExchange,
        room: Room,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Join this rank's stack with the bucket: what the tree joins now, the rest as pieces of their own."""
        held = self._stack.held_for(parameters) if step.shard is not None else []
        if step.shard is None or not held:
            return
        # gradients() is right about places only: it shows every gradient as contiguous, whatever its layout.
        offsets = [int(gradient.storage_offset() - buffer.storage_offset()) for gradient in gradients]
        views = self._stack.views_of(room.out, parameters, offsets)
        joined = self._stack.top_joins(step.shard, step.shape.leaves)
        for sums in reversed(held[len(held) - joined :]):
            # Only a rank that holds all shards joins the root here, and then with the last addition.
            if self._wire.rounds and len(step.shape.in_order) == 1 and sums is held[0]:
                for view, part in zip(views, sums, strict=True):
                    self._wire.add(view, part, at_root=True)
            else:
                torch._foreach_add_(views, sums)
        for position, sums in enumerate(held[: len(held) - joined]):
            torch._foreach_copy_(self._stack.views_of(room.extra(position), parameters, offsets), sums)
