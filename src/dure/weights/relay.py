"""Windows of bytes on their way from the storage to every rank.

Each window is in shared memory of the node. Readers take windows in turn; on another node than the reader's, one
rank has it sent. A thread does that, while the rank itself copies the windows that came before. There is room for
some windows, used in turn: whoever brings a window waits until everyone has copied what lay there.

Every rank counts the windows that it has brought and those that it has copied. Who waits, waits for such a counter
of one peer, and looks whether any rank is in trouble: nobody waits for a rank that failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from dure.base.errors import PeerLost
from dure.comm.group import naming_the_wait
from dure.weights.filling import Bytes
from dure.weights.load_group import STAGING_START, LoadGroup
from dure.weights.windows import STAGING_BYTES, Window

_BROUGHT, _COPIED, _TROUBLE = range(3)
_WHAT = "loading weights"
_WORD_TIMEOUT = timedelta(seconds=30)

ReadInto = Callable[[str, int, memoryview], None]
"""File, first byte, where to: `Store.read_into`."""


@dataclass(frozen=True)
class _Coming:
    """A window that another node sends: first a word whether it comes at all, then its bytes."""

    window: int
    reader: int
    trouble: torch.Tensor
    works: tuple[dist.Work, dist.Work]


class Relay:
    """Brings windows, one after the other. A collective: every rank of the group takes all of them."""

    def __init__(
        self,
        load_group: LoadGroup,
        windows: Sequence[Window],
        readers: Sequence[int],
        read_into: ReadInto,
        window_bytes: int,
    ) -> None:
        """`readers` are the ranks that read; no window is longer than `window_bytes`."""
        self._windows = windows
        self._read_into = read_into
        self._rank = load_group.rank
        self._readers = list(readers)
        self._counters = load_group.counters
        self._between = load_group.between
        self._shared = memoryview(load_group.segment.bytes)
        self._slot_bytes = window_bytes
        self._slots = STAGING_BYTES // window_bytes
        here = next(node for node, ranks in enumerate(load_group.nodes) if self._rank in ranks)
        by_reader = [load_group.bringers(reader) for reader in self._readers]
        self._bringers = [bringers[here] for bringers in by_reader]
        """The rank of this node that brings a reader's windows, by reader."""
        self._place = {rank: place for place, rank in enumerate(load_group.nodes[here])}
        self._sends_to: list[int] = []
        if self._rank in self._readers:
            self._sends_to = [r for r in load_group.bringers(self._rank) if r != self._rank]
        self._sending: list[tuple[int, list[dist.Work], list[torch.Tensor]]] = []
        self._coming: _Coming | None = None
        self._next_sent = 0
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Relay:
        if self._rank in self._bringers:
            self._thread = threading.Thread(target=self._bring_all, name="load", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # The thread may be in a read that nobody can end; it finds out, and the process goes on without it.
            self._tell_trouble()
        elif self._thread is not None:
            self._thread.join()

    def arrivals(self) -> Iterator[tuple[Window, Bytes]]:
        """Each window with its bytes, to be copied before the next is asked for."""
        for index, window in enumerate(self._windows):
            place = self._place[self._bringers[index % len(self._readers)]]
            self._counters.wait(place, _BROUGHT, index + 1, _WHAT, self._look)
            yield window, self._slot(index).numpy()
            self._counters.set(_COPIED, index + 1)

    def _bring_all(self) -> None:
        try:
            for index in range(len(self._windows)):
                turn = index % len(self._readers)
                if self._bringers[turn] == self._rank:
                    self._bring(index, self._readers[turn])
            self._finish_coming()
            self._finish_sending(len(self._windows))
        except Exception as error:
            self._error = error
            self._tell_trouble()
            self._tell_other_nodes()

    def _bring(self, index: int, reader: int) -> None:
        if not self._is_free(index):
            # Others may wait for what is coming before they let go of this place.
            self._finish_coming()
            self._wait_until_free(index)
        self._finish_sending(index - self._slots + 1)
        if reader != self._rank:
            coming = self._ask_for(index, reader)
            self._finish_coming()
            self._coming = coming
            return
        window = self._windows[index]
        self._read_into(window.file, window.start, self._bytes(index))
        self._send(index)
        self._finish_coming()
        self._counters.set(_BROUGHT, index + 1)

    def _slot(self, index: int) -> torch.Tensor:
        return torch.frombuffer(self._bytes(index), dtype=torch.uint8)

    def _bytes(self, index: int) -> memoryview:
        start = STAGING_START + index % self._slots * self._slot_bytes
        return self._shared[start : start + self._windows[index].nbytes]

    def _is_free(self, index: int) -> bool:
        return self._counters.all_reached(_COPIED, index - self._slots + 1)

    def _wait_until_free(self, index: int) -> None:
        for place in range(self._counters.size):
            self._counters.wait(place, _COPIED, index - self._slots + 1, _WHAT, self._look)

    def _ask_for(self, index: int, reader: int) -> _Coming:
        """Receives are posted early: what came before anyone asked would wait in the socket."""
        trouble = torch.zeros(1, dtype=torch.uint8)
        works = (
            dist.irecv(trouble, reader, group=self._between, tag=2 * index),
            dist.irecv(self._slot(index), reader, group=self._between, tag=2 * index + 1),
        )
        return _Coming(index, reader, trouble, works)  # type: ignore[arg-type]

    def _finish_coming(self) -> None:
        coming, self._coming = self._coming, None
        if coming is None:
            return
        with naming_the_wait(self._rank, f"{_WHAT} with rank {coming.reader}"):
            coming.works[0].wait()
            if coming.trouble.item():
                raise PeerLost(f"rank {coming.reader}, on another node, cannot go on with {_WHAT}")
            coming.works[1].wait()
        self._counters.set(_BROUGHT, coming.window + 1)

    def _send(self, index: int) -> None:
        for receiver in self._sends_to:
            tensors = [torch.zeros(1, dtype=torch.uint8), self._slot(index)]
            works = [
                dist.isend(tensor, receiver, group=self._between, tag=2 * index + at)
                for at, tensor in enumerate(tensors)
            ]
            self._sending.append((index, works, tensors))  # type: ignore[arg-type]
        self._next_sent = index + len(self._readers)

    def _finish_sending(self, before: int) -> None:
        """Wait until all windows before this one are sent: their places may be used again."""
        while self._sending and self._sending[0][0] < before:
            _, works, _ = self._sending.pop(0)
            for work in works:
                with naming_the_wait(self._rank, _WHAT):
                    work.wait()

    def _tell_trouble(self) -> None:
        self._counters.set(_TROUBLE, 1)
        for counter in (_BROUGHT, _COPIED):
            self._counters.wake(counter)

    def _tell_other_nodes(self) -> None:
        """Whoever waits for this rank's next window gets word instead."""
        if not self._sends_to:
            return
        tag = 2 * max(self._next_sent, self._readers.index(self._rank))
        word = torch.ones(1, dtype=torch.uint8)
        try:
            works = [dist.isend(word, to, group=self._between, tag=tag) for to in self._sends_to]
            for work in works:
                assert work is not None
                work.wait(_WORD_TIMEOUT)  # a send that nobody holds is taken back
        except RuntimeError:
            return  # they have found out already, and do not listen any more

    def _look(self) -> None:
        if self._error is not None and threading.current_thread() is not self._thread:
            raise self._error
        if self._counters.values[:, _TROUBLE].any():
            raise PeerLost(f"another rank cannot go on with {_WHAT}")
