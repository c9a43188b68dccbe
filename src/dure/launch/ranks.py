"""The ranks of this host as processes: start, look, end. No call waits without a deadline."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from dure.base.errors import Failure, RankFailed
from dure.base.say import say
from dure.launch import process_tree
from dure.launch.failure import ended_without_report, exit_words, seconds_since
from dure.launch.prefork import (
    FOR_THE_LAUNCHER,
    Ended,
    RankRequest,
    RankStarted,
    StoreEnded,
    TeamRequest,
    command,
)
from dure.launch.rank import RankStart, Returned, Said, read_report
from dure.launch.streams import Passthrough

_REPORT_PIPE_BYTES = 1 << 20
_UNWIND_SECONDS = 2.0


class Ranks:
    """A prefork server and the ranks that it has. Make it from the main thread: its end ends the processes."""

    def __init__(
        self,
        logs: Sequence[Path],
        *,
        preload: Sequence[str],
        env: Mapping[str, str],
        search_path: Sequence[str] | None,
        tee: bool,
        extra: Sequence[str] = (),
        stock: bool = False,
        first: int = 0,
        within: Sequence[str] = (),
        on_said: Callable[[str], None] = say,
    ) -> None:
        """Start the prefork server, which forks one rank for each of `logs`. It imports `preload` from `search_path`,
        and `extra` where ranks can still be forked after it; with `stock`, torch is as any interpreter has it.

        Without a `search_path` it imports as a fresh interpreter does. `tee` shows the ranks' output on
        the console too. `first` is the number of the first rank: other nodes may have those before it.
        `within` is a command that becomes the command that follows it, such as `nsenter … --`. `on_said` is told what
        ranks have to say at once.
        """
        self.count = len(logs)
        self.numbers = range(first, first + len(logs))
        self.pids: dict[int, int] = {}
        self.ended: dict[int, Ended] = {}
        self.reports: dict[int, Returned | Failure] = {}
        self.killed: list[int] = []
        """Those that were there when the grace of the last `end` was over."""
        self.lost: str = ""
        """How the prefork server ended, if it ended before it was asked to."""
        self.store_failure: Failure | None = None
        """How the team's store ended, if it did."""
        self.unwatched: set[int] = set()
        """Ranks without a heartbeat file, as the disk is full."""
        self._pidfds: dict[int, int] = {}
        self._said: set[str] = set()
        self._on_said = on_said
        self._passthrough = Passthrough(logs) if tee else None
        self._report_reads: dict[int, int] = {}
        self._report_data = {rank: bytearray() for rank in self.numbers}
        self._report_writes: dict[int, int] = {}
        for rank in self.numbers:
            read, write = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read, False)
            with contextlib.suppress(OSError):  # a user's pipes may be limited; a smaller one is only slower
                fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, _REPORT_PIPE_BYTES)
            self._report_reads[rank] = read
            self._report_writes[rank] = write
        self._sockets = None if stock else _socket_folder()
        ours, theirs = socket.socketpair()
        line = command(
            theirs.fileno(),
            os.getpid(),
            tuple(preload),
            tuple(extra),
            list(search_path) if search_path else None,
            stock=stock,
            sockets=self._sockets,
        )
        # The prefork server lets signals through when it knows what to do with them.
        try:
            with theirs, _blocked(FOR_THE_LAUNCHER):
                self._prefork_server = subprocess.Popen(
                    [*within, *line],
                    env=dict(env),
                    pass_fds=[theirs.fileno(), *self._report_writes.values(), *self._console_ends()],
                )
        except BaseException:
            self._remove_sockets()
            raise
        self._line = Connection(ours.detach())
        for write in self._report_writes.values():
            os.close(write)
        if self._passthrough is not None:
            self._passthrough.start()

    def _remove_sockets(self) -> None:
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _console_ends(self) -> list[int]:
        if self._passthrough is None:
            return []
        return [end for rank in range(self.count) for end in self._passthrough.ends(rank)]

    def start(
        self,
        starts: Sequence[RankStart],
        deadline_seconds: float,
        check: Callable[[], None],
        listener: socket.socket | None = None,
    ) -> None:
        """Start the ranks, and wait until all have started; `check` is called meanwhile and may raise.

        With a `listener`, which is closed here, a new store is served there until the next team starts.
        """
        requests = []
        for start in starts:
            out, err = (
                self._passthrough.ends(self.numbers.index(start.rank)) if self._passthrough else (None, None)
            )
            requests.append(
                RankRequest(start.rank, pickle.dumps(start), out, err, self._report_writes[start.rank])
            )
        with contextlib.suppress(OSError):  # a prefork server that is gone is noticed below
            self._line.send_bytes(pickle.dumps(TeamRequest(requests, store=listener is not None)))
            if listener is not None:
                send_handle(self._line, listener.fileno(), None)
        if listener is not None:
            listener.close()
        deadline = time.monotonic() + deadline_seconds
        while len(self.pids) < self.count:
            check()
            self._line.poll(0.05)
            self.poll()
            if self.lost:
                raise RankFailed(Failure(f"no rank could start: {self.lost}", host=socket.gethostname()))
            if time.monotonic() > deadline:
                missing = sorted(set(self.numbers) - set(self.pids))
                message = (
                    f"ranks {missing} did not start within {deadline_seconds:.0f} s; is torch on a slow disk?"
                )
                raise RankFailed(Failure(message, rank=missing[0], host=socket.gethostname()))

    def wait(self, seconds: float) -> None:
        """Wait until a rank has started or ended, at most so long."""
        if self.lost:
            time.sleep(seconds)
            return
        with contextlib.suppress(OSError):
            self._line.poll(seconds)

    def poll(self) -> None:
        """Take in what has happened since the last look, without waiting."""
        try:
            while self._line.poll(0):
                match self._line.recv():
                    case RankStarted(rank, pid):
                        self.pids[rank] = pid
                        # A pid may come to mean another process; this descriptor always means the rank.
                        with contextlib.suppress(OSError):
                            self._pidfds[rank] = os.pidfd_open(pid)
                    case Ended() as ended:
                        self.ended[ended.rank] = ended
                    case StoreEnded(exit_code, at_ns):
                        self.store_failure = Failure(
                            f"the process in which ranks find each other (dure store) on {socket.gethostname()} "
                            f"{exit_words(exit_code, silent=False)}",
                            host=socket.gethostname(),
                            may_pass=True,
                            killed=exit_code < 0,
                            at_ns=at_ns,
                        )
        except (EOFError, OSError):
            if not self.lost:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._prefork_server.wait(1)
                code = self._prefork_server.returncode
                words = exit_words(code) if code is not None else "closed its socket"
                self.lost = f"the process that ranks are forked from (pid {self._prefork_server.pid}) {words}"
        # After the ends: what a rank that has ended wrote is all in its pipe by now.
        for rank, descriptor in self._report_reads.items():
            if rank not in self.reports:
                self._read_report(rank, descriptor)

    def _read_report(self, rank: int, descriptor: int) -> None:
        data = self._report_data[rank]
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(descriptor, _REPORT_PIPE_BYTES):
                data += chunk
        while (report := read_report(data)) is not None:
            if not isinstance(report, Said):
                self.reports[rank] = report
                return
            if report.unwatched:
                self.unwatched.add(rank)
            if report.text not in self._said:  # ranks in the same trouble say the same
                self._said.add(report.text)
                self._on_said(report.text)

    def failure(
        self, rank: int, log: Path, *, returns: bool, silent: bool = True, host: str | None = None
    ) -> Failure | None:
        """How a rank failed, as far as the last `poll` knows; with `returns`, an end without a value is a failure.

        `log`, `silent` and `host` are for one that does not say why (`ended_without_report`).
        """
        ended = self.ended.get(rank)
        report = self.reports.get(rank)
        if isinstance(report, Failure):
            # It still prints its traceback and runs its exit hooks: ending it now would cut them off.
            unwinding = ended is None and seconds_since(report.at_ns) < _UNWIND_SECONDS
            return None if unwinding else report
        if ended is None or (ended.exit_code == 0 and (report is not None or not returns)):
            return None
        returned = report is not None
        return ended_without_report(
            rank, ended.exit_code, log, at_ns=ended.at_ns, returned=returned, silent=silent, host=host
        )

    def alive(self) -> list[int]:
        """Return the ranks whose processes run, as far as the last `poll` knows."""
        if self.lost:
            return [rank for rank in self.pids if rank not in self.ended and self.state(rank)]
        return [rank for rank in self.pids if rank not in self.ended]

    def state(self, rank: int) -> str:
        """Return the kernel's letter for what a rank does, "" when it is gone."""
        return process_tree.state(self.pids[rank]) if rank in self.pids and rank not in self.ended else ""

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a rank; one that is gone is no error."""
        descriptor = self._pidfds.get(rank)
        if descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)

    def interrupt(self, rank: int) -> None:
        """Do to a rank, and all processes that it has started, what Ctrl-C in its own terminal would do."""
        descriptor = self._pidfds.get(rank)
        if descriptor is None or select.select([descriptor], [], [], 0)[0]:  # it has ended
            return
        try:
            os.killpg(self.pids[rank], signal.SIGINT)
        except OSError:  # so young that it has no group of its own yet
            self.send(rank, signal.SIGINT)

    def end(
        self,
        grace_seconds: float,
        number: signal.Signals = signal.SIGTERM,
        hurry: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Tell all ranks to end by a signal, and kill those that are there after the grace, or when `hurry` says so.

        A hang-up is passed on as SIGTERM to a rank that has no handler for it: it may save for that one.
        A rank that has said why it fails is not told: it ends already, and has the grace for its exit hooks. One that
        is stopped is killed at once. Returns the ranks that even SIGKILL did not end (stuck in the kernel).
        """
        self.poll()
        for rank in self.alive():
            if self.state(rank) in ("T", "t"):
                self.send(rank, signal.SIGKILL)
            elif grace_seconds > 0 and isinstance(self.reports.get(rank), Failure):
                continue
            elif number is signal.SIGINT:
                self.interrupt(rank)
            elif number is signal.SIGHUP and not process_tree.catches(self.pids[rank], number):
                self.send(rank, signal.SIGTERM)
            else:
                self.send(rank, number)
        self._wait_for_ends(grace_seconds, hurry)
        self.killed = self.alive()
        for rank in self.killed:
            self.send(rank, signal.SIGKILL)
        self._wait_for_ends(5.0)
        return self.alive()

    def forget(self) -> None:
        """Make room for a new team in place of one that `end` has ended."""
        self.poll()
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        for data in self._report_data.values():
            data.clear()
        self.store_failure = None
        for known in (self.pids, self.ended, self.reports, self._pidfds, self.unwatched):
            known.clear()

    def renumber(self, first: int, count: int) -> None:
        """Let the next team have `count` ranks here, from the number `first` on; never more than at first."""
        most = len(self._report_reads)
        known: tuple[dict[int, Any], ...] = (self._report_reads, self._report_writes, self._report_data)
        for by_rank in known:
            values = list(by_rank.values())
            by_rank.clear()
            by_rank.update(zip(range(first, first + most), values, strict=True))
        self.count = count
        self.numbers = range(first, first + count)

    def _wait_for_ends(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline and not hurry():
            if self.lost:
                time.sleep(0.01)
            else:
                self._line.poll(0.05)
            self.poll()

    def close(self) -> None:
        """End the prefork server and whatever the ranks left running; pass on the last output."""
        self._line.close()
        if not self.pids:
            self._prefork_server.kill()  # it may be in the middle of a long import, with nothing to clear away
        try:
            self._prefork_server.wait(8)
        except subprocess.TimeoutExpired:
            self._prefork_server.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._prefork_server.wait(2)
        self._remove_sockets()
        if self._passthrough is not None:
            self._passthrough.finish(0.5)
        for descriptor in (*self._report_reads.values(), *self._pidfds.values()):
            os.close(descriptor)


def _socket_folder() -> str | None:
    """A folder for the sockets of `multiprocessing`, for all ranks and the data loaders' workers under them.

    Each would make one in $TMPDIR by itself, and a process that is killed leaves its folder behind. Whoever is the last
    to go, the prefork server or the launcher, removes this one.
    """
    with contextlib.suppress(OSError):  # a full disk: they will see for themselves
        return tempfile.mkdtemp(prefix="dure-sockets-")
    return None


@contextlib.contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Start a process within that ignores these signals from the start; for this one they come a moment later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
