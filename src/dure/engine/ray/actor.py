"""The actor on a node of Ray: a child process is the node's agent; the driver asks for its output and gives orders.

The agent is told that the supervisor lives only when the driver has just said so. It ends when the driver is not heard
of for `lost_seconds`, and when this actor's process has ended: then its standard input closes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from dure.base.errors import UsageError
from dure.base.team_key import TeamKey
from dure.engine.agent_process import AgentProcess

_MOST_LINES = 10_000
"""That the driver has not asked for yet; of more, the first are forgotten."""
_OF_RAY = ("RAY_", "OMP_NUM_THREADS")
"""Variables that Ray has set for its worker, and that mean nothing, or something else, to the ranks."""

Beat = tuple[list[tuple[str, bool]], int | None]
"""(lines, and whether each came over standard output; the exit code once it has ended)."""


class AgentActor:
    """Ray calls its methods one by one."""

    def __init__(self) -> None:
        self._agent: AgentProcess | None = None
        self._lines: deque[tuple[str, bool]] = deque(maxlen=_MOST_LINES)

    def begin(
        self, python: str | None, folder: str, environ: Mapping[str, str], start: bytes, key: TeamKey
    ) -> None:
        """Start the agent in `folder`. The key is an argument of this call and not of the actor's creation, which Ray
        keeps in its store."""
        if not os.path.isdir(folder):
            raise UsageError(
                f"the folder {folder} is not there on {socket.gethostname()}; all nodes must see it at the same path"
            )
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
        self._agent = AgentProcess(
            [python or sys.executable, "-m", "dure", "agent", "-"],
            start,
            key,
            self._take,
            beats=False,
            folder=folder,
            environ={**kept, **environ},
        )

    def beat(self, orders: Sequence[tuple[str, Mapping[str, str | int]]], let_go: bool) -> Beat:
        """Hand orders on, and return what the agent has printed since the last call."""
        assert self._agent is not None
        for name, fields in orders:
            self._agent.tell(name, **fields)
        if let_go:
            self._agent.let_go()
        code = self._agent.wait(0.0) if self._agent.exit_code() is not None else None
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines, code

    def _take(self, line: str, is_output: bool) -> None:
        self._lines.append((line, is_output))
        # Ray keeps what its workers print, and shows it in the dashboard.
        print(line, file=sys.stdout if is_output else sys.stderr, flush=True)
