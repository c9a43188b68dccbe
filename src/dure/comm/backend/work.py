"""What a collective returns, and the thread that does those that nobody waits for at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dure.base.errors import DureError

CLOSE_SECONDS = 5.0

Task = Callable[[], None]


class DureWork(dist.Work):
    """A collective on its way. torch's C++ calls `wait` and `get_future`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def run(self, task: Task) -> None:
        """Do it, in this thread; never raises: `wait` does."""
        try:
            task()
        except BaseException as failure:  # whatever it is, somebody waits to be told
            self._failure = failure
        with self._lock:
            self._over.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is over; raises what went wrong."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._over.wait(seconds if seconds > 0 else None):
            raise TimeoutError(f"the collective is not over after {seconds:g} s")
        if self._failure is not None:
            raise self._failure
        return True

    def synchronize(self) -> None:
        """As `wait`: there are no streams on a CPU."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._over.is_set() and self._failure is None

    def exception(self) -> BaseException | None:
        """What went wrong, so far."""
        return self._failure

    def result(self) -> list[torch.Tensor]:
        """The tensors that it has filled."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completed with the tensors, or with what went wrong."""
        first: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        # An exception that is a future's value is none to C++, where DDP waits; one that a callback raises is.
        chained: torch.futures.Future[list[torch.Tensor]] = first.then(_value)
        with self._lock:
            if self._future is None and not self._over.is_set():
                self._future = first
                return chained
            earlier = None if self._over.is_set() else self._future
        if earlier is not None:
            return earlier.then(_value)
        self._complete(first)
        return chained

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._failure is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(RuntimeError(str(self._failure)))  # type: ignore[arg-type]


def _value(future: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
    return future.value()


class Stopped(DureError):
    """The process group was destroyed while a collective waited."""


class InOrder:
    """Does one task after the other: in the caller's thread if that waits anyway and nothing is before it, else in its
    own."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._running = threading.Lock()
        self._pending = 0
        self._stops = False
        self._tasks: queue.SimpleQueue[tuple[DureWork, Task] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: DureWork, task: Task, *, waits: bool) -> DureWork:
        """Do a task when all earlier ones are done. `waits`: the caller does nothing else until then."""
        with self._mutex:
            if self._stops:
                raise Stopped("the process group is destroyed")
            here = waits and self._pending == 0
            self._pending += 1
            if here:
                self._running.acquire()
            else:
                self._start()
                self._tasks.put((work, task))
        if here:
            try:
                work.run(task)
            finally:
                self._done()
        return work

    def look(self) -> None:
        """Raise Stopped if nobody waits any more."""
        if self._stops:
            raise Stopped("the process group was destroyed while a collective waited for other ranks")

    def close(self) -> None:
        """End the thread when it has done all tasks; what still waits for other ranks after some seconds fails."""
        with self._mutex:
            thread, self._thread = self._thread, None
            self._tasks.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)
        self._stops = True
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dure-collectives", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (next_one := self._tasks.get()) is not None:
            self._running.acquire()
            work, task = next_one
            try:
                work.run(task)
            finally:
                self._done()
            del next_one, work, task  # their tensors must not stay until another one comes

    def _done(self) -> None:
        with self._mutex:
            self._pending -= 1
        self._running.release()
