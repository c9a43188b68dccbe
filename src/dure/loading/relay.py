"""Windows of bytes on their way from the storage to every rank.

Each window lies in shared memory of the node. Every reader reads its part into it; parts that ranks of other nodes
read are fetched once a node, by one rank. A thread does that, while the rank itself copies the window before.
There are a few windows' room, used in turn: a reader waits until everyone has copied what lay there.

Every rank counts the windows that it has brought, and those that it has copied. Who waits, waits for such a counter
of one peer, and looks whether any rank is in trouble: nobody waits for a rank that failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from dure.errors import PeerLost
from dure.exchange.group import naming_the_wait
from dure.loading.circle import SLOT_BYTES, SLOTS, Circle
from dure.loading.filling import Bytes
from dure.loading.windows import Window, parts

_BROUGHT, _COPIED, _TROUBLE = range(3)
_WHAT = "loading weights"

ReadInto = Callable[[str, int, memoryview], None]
"""File, first byte, where to: `Store.read_into`."""


class Relay:
    """Brings windows, one after the other. A collective: every rank of the circle takes all of them."""

    def __init__(
        self, circle: Circle, windows: Sequence[Window], readers: Sequence[int], read_into: ReadInto
    ) -> None:
        """`readers` are the ranks that read."""
        self._circle = circle
        self._windows = windows
        self._read_into = read_into
        self._rank = circle.rank
        self._readers = list(readers)
        self._counters = circle.counters
        self._slots = [
            torch.frombuffer(circle.shared, dtype=torch.uint8, count=SLOT_BYTES, offset=at)
            for at in map(circle.slot, range(SLOTS))
        ]
        self._sends_to = circle.receivers(self._rank) if self._rank in self._readers else []
        self._fetches = [r for r in self._readers if self._rank in circle.receivers(r)]
        self._sending: dict[int, list[tuple[dist.Work, torch.Tensor]]] = {}
        self._coming: dict[int, list[tuple[int, dist.Work, torch.Tensor, dist.Work | None]]] = {}
        self._sent = 0
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Relay:
        if self._rank in self._readers or self._fetches:
            self._thread = threading.Thread(target=self._bring_all, name="load", daemon=True)
            self._thread.start()
        else:
            self._counters.set(_BROUGHT, len(self._windows))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # The thread may be in a read that nobody can end; it finds out, and the process goes on without it.
            self._tell_trouble()
            return
        if self._thread is not None:
            self._thread.join()

    def arrivals(self) -> Iterator[tuple[Window, Bytes]]:
        """Each window with its bytes, to be copied before the next is asked for."""
        for index, window in enumerate(self._windows):
            self._wait_for_all(_BROUGHT, index + 1)
            yield window, self._slots[index % SLOTS].numpy()
            self._counters.set(_COPIED, index + 1)

    def _bring_all(self) -> None:
        try:
            for index in range(len(self._windows)):
                self._wait_for_all(_COPIED, index + 1 - SLOTS)
                self._finish_sending(index - SLOTS)
                self._ask_for(index)
                self._read_part(index)
                self._send(index)
                self._finish(index - 1)
            self._finish(len(self._windows) - 1)
            for index in list(self._sending):
                self._finish_sending(index)
        except Exception as error:
            self._error = error
            self._tell_trouble()
            self._tell_other_nodes()

    def _read_part(self, index: int) -> None:
        if self._rank not in self._readers:
            return
        window = self._windows[index]
        part = parts(window.nbytes, len(self._readers))[self._readers.index(self._rank)]
        if part:
            at = self._circle.slot(index % SLOTS)
            into = memoryview(self._circle.shared)[at + part.start : at + part.stop]
            self._read_into(window.file, window.start + part.start, into)

    def _finish(self, index: int) -> None:
        """Count a window as brought, once all that this rank fetches of it is there."""
        if index < 0:
            return
        for reader, flag_work, flag, part_work in self._coming.pop(index, ()):
            with naming_the_wait(self._rank, f"{_WHAT} with rank {reader}"):
                flag_work.wait()
                if flag.item():
                    raise PeerLost(f"rank {reader}, on another node, cannot go on with {_WHAT}")
                if part_work is not None:
                    part_work.wait()
        self._counters.set(_BROUGHT, index + 1)

    def _part_of(self, index: int, reader: int) -> torch.Tensor:
        part = parts(self._windows[index].nbytes, len(self._readers))[self._readers.index(reader)]
        return self._slots[index % SLOTS][part.start : part.stop]

    def _ask_for(self, index: int) -> None:
        """Receives are posted before the read: what came before anyone asked would wait in the socket."""
        for reader in self._fetches:
            flag, part = torch.zeros(1, dtype=torch.uint8), self._part_of(index, reader)
            flag_work = dist.irecv(flag, reader, group=self._circle.between, tag=2 * index)
            part_work = None
            if part.numel():
                part_work = dist.irecv(part, reader, group=self._circle.between, tag=2 * index + 1)
            assert flag_work is not None
            self._coming.setdefault(index, []).append((reader, flag_work, flag, part_work))

    def _send(self, index: int) -> None:
        for receiver in self._sends_to:
            flag, part = torch.zeros(1, dtype=torch.uint8), self._part_of(index, self._rank)
            for tensor, tag in ((flag, 2 * index), (part, 2 * index + 1)):
                if tensor.numel():
                    work = dist.isend(tensor, receiver, group=self._circle.between, tag=tag)
                    assert work is not None
                    self._sending.setdefault(index, []).append((work, tensor))
        self._sent = index + 1

    def _finish_sending(self, index: int) -> None:
        for work, _ in self._sending.pop(index, ()):
            with naming_the_wait(self._rank, _WHAT):
                work.wait()

    def _tell_trouble(self) -> None:
        self._counters.set(_TROUBLE, 1)
        for counter in (_BROUGHT, _COPIED):
            self._counters.wake(counter)

    def _tell_other_nodes(self) -> None:
        """Whoever waits for this rank's next part gets word instead."""
        self._flags = [torch.ones(1, dtype=torch.uint8) for _ in self._sends_to]
        for receiver, flag in zip(self._sends_to, self._flags, strict=True):
            try:
                dist.isend(flag, receiver, group=self._circle.between, tag=2 * self._sent)
            except RuntimeError:
                continue  # it has found out already, and is gone

    def _wait_for_all(self, counter: int, value: int) -> None:
        values = self._counters.values[:, counter]
        for peer in range(self._counters.size):
            if values[peer] < value:
                self._counters.wait(peer, counter, value, _WHAT, self._look)

    def _look(self) -> None:
        if self._error is not None and threading.current_thread() is not self._thread:
            raise self._error
        if self._counters.values[:, _TROUBLE].any():
            raise PeerLost(f"another rank cannot go on with {_WHAT}")
