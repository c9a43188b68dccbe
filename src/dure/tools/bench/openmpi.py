"""OpenMPI as a contender: its ranks run under mpirun beside ours, asleep until they are asked.

The bench starts them (`beside`), our rank 0 asks them (`Asker`); in between is a socket in a folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

from dure.base.errors import DureError

PYTHON = "/usr/bin/python3"
"""Debian's own, for which Debian's mpi4py is made."""
ANSWER_SECONDS = 120.0
_START_SECONDS = 60.0
_END_SECONDS = 15.0
_PR_SET_PDEATHSIG = 1


def is_installed() -> bool:
    """Whether mpirun and mpi4py are here."""
    if shutil.which("mpirun") is None or not Path(PYTHON).exists():
        return False
    asked = subprocess.run(
        [PYTHON, "-c", "import mpi4py"], capture_output=True, timeout=_START_SECONDS, check=False
    )
    return asked.returncode == 0


@contextlib.contextmanager
def beside(folder: Path, ranks: int) -> Iterator[None]:
    """Within `with`, OpenMPI's ranks wait for questions in `folder`; afterwards none is left."""
    peer = Path(__file__).with_name("mpi_peer.py")
    command = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
    # Loaded here: between fork and exec is no place for it.
    prctl = ctypes.CDLL(None).prctl
    with _log(folder).open("wb") as log:
        running = subprocess.Popen(
            [*command, PYTHON, str(peer), str(_address(folder))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # mpirun clears up after SIGTERM; should this process be killed, nobody else would send it one.
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),  # noqa: PLW1509
        )
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(_END_SECONDS)  # its ranks have been told; let them leave in peace
    finally:
        for end in (running.terminate, running.kill):
            if running.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(_END_SECONDS)


class Asker:
    """The side that asks, in one process. Closing it ends OpenMPI's ranks."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._lines: dict[int, TextIO] = {}
        self._connections: list[socket.socket] = []
        deadline = time.monotonic() + _START_SECONDS
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(_address(folder)))
            listener.listen(ranks)
            while len(self._lines) < ranks:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection = listener.accept()[0]
                except TimeoutError:
                    came = f"{len(self._lines)} of OpenMPI's {ranks} ranks came within {_START_SECONDS:.0f} s"
                    raise self._trouble(came) from None
                connection.settimeout(ANSWER_SECONDS)
                self._connections.append(connection)
                line = connection.makefile("rw")
                self._lines[int(self._read(line))] = line

    def seconds(self, numel: int, repeats: int) -> float:
        """Seconds of one all-reduce of `numel` float32, as OpenMPI's ranks measure it."""
        try:
            for line in self._lines.values():
                line.write(json.dumps([numel, repeats]) + "\n")
                line.flush()
        except OSError:
            raise self._trouble("one of OpenMPI's ranks has ended") from None
        return max(float(self._read(line)) for line in self._lines.values())

    def close(self) -> None:
        """Ask no more."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.close()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Asker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, line: TextIO) -> str:
        try:
            answer = line.readline()
        except TimeoutError:
            raise self._trouble(f"OpenMPI did not answer within {ANSWER_SECONDS:.0f} s") from None
        except ConnectionError:
            answer = ""
        if not answer:
            raise self._trouble("one of OpenMPI's ranks has ended")
        return answer

    def _trouble(self, what: str) -> DureError:
        said = _log(self._folder).read_text(errors="replace").strip()[-2000:]
        return DureError(f"{what}; mpirun said: {said or 'nothing'}")


def _address(folder: Path) -> Path:
    return folder / "openmpi"


def _log(folder: Path) -> Path:
    return folder / "openmpi.log"
