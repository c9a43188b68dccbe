"""This rank among the others: who it is, and the small things that ranks do together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dure.comm.call_board import CallBoard
from dure.comm.group import Group
from dure.comm.topology import Topology
from dure.observe.heartbeat import Heartbeat
from dure.observe.loggers import Run
from dure.step.forward import Setting
from dure.team.logs import TeamLogs
from dure.team.small import gather, on_leader


class Member:
    """What a team offers besides training."""

    def __init__(
        self, topology: Topology, setting: Setting, threads: int, heartbeat: Heartbeat, calls: CallBoard
    ) -> None:
        self.topology = topology
        self.setting = setting
        self.threads = threads
        self.heartbeat = heartbeat
        self.group = Group(None, topology.rank, topology.size, heartbeat.waiting)
        """All ranks, for small exchanges on the training thread."""
        self.logs = TeamLogs(self.group)
        """Where `log` goes."""
        self._calls = calls

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.topology.rank

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0: the one that prints and saves."""
        return self.topology.is_leader

    @property
    def device(self) -> torch.device:
        """Where this rank's model and batches are."""
        return self.setting.device

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print on rank 0 alone, at once."""
        if self.is_leader:
            print(*values, sep=sep, end=end, flush=True)

    def barrier(self) -> None:
        """Wait until all ranks are here; a collective call."""
        with self._calls.inside("barrier"):
            self.group.gather("", "a barrier")

    def gather(self, value: Any) -> list[Any]:
        """Everyone's plain value (numbers, texts, lists, dicts), in rank order; a collective call."""
        with self._calls.inside("gather"):
            return gather(self.group, value)

    def on_leader(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on rank 0 alone, while the others wait: what it returns, a plain value, or what it raises is
        everybody's. A collective call."""
        with self._calls.inside("on_leader"):
            return on_leader(self.group, function, args, kwargs)

    def log_to(
        self,
        *loggers: str,
        folder: str | Path,
        name: str = "run",
        project: str = "dure",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Choose where `log` goes: `csv`, `jsonl`, `tensorboard`, `mlflow`, `wandb`, `trackio`; a collective call.

        There is one run in each, written by rank 0 in a thread of its own. `folder` keeps the run's id: with the same
        folder a script that is started again goes on with the same run, and logs no step twice. A logger whose package
        is missing is an error here; one that fails later never stops training.
        """
        with self._calls.inside("log_to"):
            self.logs.open(loggers, Run(Path(folder), name, project, config or {}))

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Log numbers of a step, on whatever rank: rank 0's count. Returns at once."""
        self.logs.log(values, step)
