"""DDP's communication hook: buckets leave the autograd thread at once and are exchanged in a thread of their own.

DDP keeps its bucketing and its overlap with backward. The hook only hands each bucket over; the
communication thread joins it with this rank's stack of subtrees and exchanges it. DDP waits for all its futures
at the end of the backward pass, so they are completed together, after the last bucket, behind one barrier.
"""

# No postponed annotations here: DDP looks at the hook's own.
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch._C._distributed_c10d import GradBucket

from dure.base.errors import UsageError
from dure.comm.reduce.exchanger import ALL_USED, BucketBuffers, Exchange, Exchanger, Pieces, Wire
from dure.comm.reduce.gradient_marks import GradientMarks
from dure.comm.reduce.step_totals import StepTotals
from dure.comm.reduce.subtree_stack import SubtreeStack
from dure.device.accelerator import CPU
from dure.device.streams import Ready, SideStream, future_on, ready_now

CLOSE_SECONDS = 10.0


def _nothing() -> None:
    """When nobody is to be told."""


OwnPlaces = Callable[[Sequence[torch.Tensor], Sequence[int]], list[range]]
"""The places of a bucket that a rank needs, given the bucket's parameters and where each begins."""


@dataclass(frozen=True)
class _Bucket:
    """A bucket of DDP's on its way."""

    index: int
    buffer: torch.Tensor
    offsets: Sequence[int]
    """Where each parameter's gradient begins in the buffer."""
    parameters: Sequence[torch.Tensor]
    is_last: bool
    future: torch.futures.Future[torch.Tensor]
    ready: Ready
    """When its gradients are there; recorded in the autograd thread."""


class ShardWatch(Protocol):
    """Whoever wants to see shards' gradients before anything is added to them."""

    def wants(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The positions of those whose gradients it looks at."""
        ...

    def note(
        self, shard: int, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Some of a shard's gradients; None stands for zeros."""
        ...


@dataclass
class StepExchange:
    """One step on its way through the reduce."""

    shape: Pieces
    shard: int | None
    """The shard whose gradients are in the buckets; None on an idle rank."""
    totals: StepTotals
    scale: float = 0.0
    all_used: bool = True
    """Whether this rank's shards used every parameter; to be known when the last bucket is handed over."""
    complete: bool = False
    """All buckets were handed over: DDP saw a gradient for every parameter."""
    handed_over_at: float = field(default_factory=time.perf_counter)
    """When the last bucket left the autograd thread; from then on the rank only waits."""
    flags: int = 0
    """Of all ranks, OR-ed, when the exchange is over: ALL_USED, NOT_FINITE."""
    marks: GradientMarks | None = None
    """Fingerprints of the shards' gradients, where they are asked for."""
    watch: ShardWatch | None = None
    """Sees this rank's shards' gradients too, as they are before they meet."""
    buckets: list[_Bucket] = field(default_factory=list)
    bucket_buffers: list[BucketBuffers] = field(default_factory=list)
    """Of those buckets."""
    begun: list[Ready] = field(default_factory=list)
    """When this rank's earlier shards are added; recorded in the training thread."""

    @property
    def watches(self) -> list[ShardWatch]:
        """All that look at shards' gradients."""
        return [one for one in (self.marks, self.watch) if one is not None]

    def show(self, stack: SubtreeStack, bucket: _Bucket) -> None:
        """Show the last shard's gradients, before the stack joins them."""
        for watch in self.watches if self.shard is not None else ():
            wanted = watch.wants(bucket.parameters)
            parameters = [bucket.parameters[at] for at in wanted]
            views = stack.views_of(bucket.buffer, parameters, [bucket.offsets[at] for at in wanted])
            watch.note(self.shard, parameters, views)  # type: ignore[arg-type]


class GradientExchange:
    """Owns the communication thread. `hook` is what DDP calls."""

    def __init__(
        self,
        exchanger: Exchanger,
        stack: SubtreeStack,
        wire: Wire,
        on_waiting: Callable[[], None] = _nothing,
    ) -> None:
        """`on_waiting` is called when the last bucket is handed over: from then on, the rank waits."""
        self._exchanger = exchanger
        self._on_waiting = on_waiting
        self._stack = stack
        self._wire = wire
        self._step: StepExchange | None = None
        self._own_places: OwnPlaces | None = None
        self._failure: BaseException | None = None
        self._side = SideStream()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
        self._thread.start()

    def keep_own(self, own_places: OwnPlaces) -> None:
        """From now on this rank needs the mean gradient in these places of a bucket alone."""
        self._own_places = own_places

    def begin(self, step: StepExchange) -> None:
        """Start the step's exchange; call it before the backward pass that DDP synchronises."""
        self._step = step
        # Autograd may run the last shard's backward pass in other streams than the one that added those before.
        step.begun = [ready_now(device) for device in self._stack.devices]
        self._exchanger.waits.begin()
        self._tasks.put(lambda: self._meet_totals_ready(step))

    def hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket to the communication thread and return at once."""
        step = self._step
        if step is None:
            self._failure = self._failure or UsageError(
                "a backward pass through a replicated model outside of team.step or team.forward_backward; compute its "
                "gradients there, or call the plain module instead: model.module(...)"
            )
            raise self._failure
        buffer = bucket.buffer()
        # GradBucket.gradients() shows every gradient as contiguous, whatever its layout; only its start is right.
        start = buffer.storage_offset()
        offsets = [int(gradient.storage_offset() - start) for gradient in bucket.gradients()]
        handed = _Bucket(
            bucket.index(),
            buffer,
            offsets,
            bucket.parameters(),
            bucket.is_last(),
            future_on(buffer.device),
            ready_now(buffer.device),
        )
        step.complete = handed.is_last
        step.handed_over_at = time.perf_counter()
        self._tasks.put(lambda: self._exchange(step, handed))
        if step.complete:
            self._on_waiting()
        return handed.future

    def finish(self) -> None:
        """End the step after its backward pass; raises what went wrong in the communication thread."""
        self._step = None
        self._stack.clear()
        self.raise_failure()

    def waited_after(self, at: float) -> float:
        """Seconds of the last step that this rank waited for others after `at`, and had nothing else to do."""
        return self._exchanger.waits.seconds_after(at)

    def raise_failure(self) -> None:
        """Raise the communication thread's own exception, if there is one."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread; a Python hook that outlives its thread could abort the interpreter at exit."""
        self._tasks.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._exchanger.close()
        # DDP holds this object in C++, where the garbage collector does not look: whatever leads from here back to
        # the model would keep it, and its process group's sockets, for as long as the process lives.
        self._on_waiting = _nothing
        self._own_places = None

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _meet_totals_ready(self, step: StepExchange) -> None:
        """Losses are read here, where they are there: not in whatever stream this thread begins with."""
        with self._side.after(*step.begun, device=self._stack.devices[0] if self._stack.devices else CPU):
            self._meet_totals(step)

    def _meet_totals(self, step: StepExchange) -> None:
        try:
            vector = step.totals.as_vector()
            self._exchanger.total(vector)
            step.totals.take(vector)
            step.totals.refuse_other_steps()
        except BaseException as failure:  # whatever it is, this thread must live to tell it with a bucket
            self._failure = failure
            return
        step.scale = 1.0 / step.totals.count if step.totals.count else 0.0

    def _exchange(self, step: StepExchange, bucket: _Bucket) -> None:
        try:
            step.buckets.append(bucket)
            self.raise_failure()
            with self._side.after(bucket.ready, *step.begun, device=bucket.buffer.device):
                self._exchange_ready(step, bucket)
                if bucket.is_last:
                    self._conclude(step)
        except BaseException as failure:  # whatever it is, the autograd thread must not wait for ever
            self._failure = self._failure or failure
            for waiting in step.buckets:
                waiting.future.set_exception(RuntimeError(str(failure)))  # type: ignore[arg-type]
            step.buckets.clear()

    def _exchange_ready(self, step: StepExchange, bucket: _Bucket) -> None:
        buffers = self._exchanger.buffers(bucket.index, bucket.buffer)
        step.bucket_buffers.append(buffers)
        step.show(self._stack, bucket)
        self._join_own(step, buffers, bucket)
        own = None if self._own_places is None else self._own_places(bucket.parameters, bucket.offsets)
        flags = ALL_USED if bucket.is_last and step.all_used else 0
        self._exchanger.exchange(buffers, Exchange(step.shape, step.scale, flags, own))

    def _conclude(self, step: StepExchange) -> None:
        if step.marks is not None:
            # As long as the losses' vector: the exchangers' boards are used by halves.
            vector = step.marks.as_vector(step.totals.as_vector().numel())
            self._exchanger.total(vector)
            step.marks.take(vector)
        step.flags = self._exchanger.conclude()
        for buffers, bucket in zip(step.bucket_buffers, step.buckets, strict=True):
            if buffers.out.data_ptr() != bucket.buffer.data_ptr():
                bucket.buffer.copy_(buffers.out)
        for bucket in step.buckets:
            bucket.future.set_result(bucket.buffer)
        step.buckets.clear()

    def _join_own(self, step: StepExchange, buffers: BucketBuffers, bucket: _Bucket) -> None:
        """Join this rank's stack with the bucket: what the tree joins now, the rest as pieces of their own."""
        parameters, offsets = bucket.parameters, bucket.offsets
        held = self._stack.held_for(parameters) if step.shard is not None else []
        if step.shard is None or not held:
            return
        views = self._stack.views_of(buffers.out, parameters, offsets)
        joined = self._stack.top_joins(step.shard, step.shape.leaves)
        for sums in reversed(held[len(held) - joined :]):
            # Only a rank that holds all shards joins the root here, and then with the last addition.
            if self._wire.rounds and len(step.shape.in_order) == 1 and sums is held[0]:
                for view, part in zip(views, sums, strict=True):
                    self._wire.add(view, part, at_root=True)
            else:
                torch._foreach_add_(views, sums)
        for position, sums in enumerate(held[: len(held) - joined]):
            torch._foreach_copy_(self._stack.views_of(buffers.extra(position), parameters, offsets), sums)
