"""A model whose run is interrupted by a plan: a folder of files such as `1-kill-0` (rank 0 is killed) and `2-stop`."""

import os
import signal
from pathlib import Path

from torch import nn

AFTER = 20
"""Training passes of a session before the next of the plan happens."""


class Net(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 5))
        self.plan, self.calls = Path(plan), 0
        self.register_buffer("scale", self.layers[0].bias.detach() * 0 + 1.5, persistent=False)

    def forward(self, x):
        self.calls += 1
        if self.calls == AFTER:
            self._interrupt(os.environ.get("RANK", "0"))
        return self.layers(x) * self.scale[0]

    def _interrupt(self, rank):
        ahead = sorted(self.plan.glob("[0-9]-*"))
        what = ahead[0].name.split("-") if ahead else ["", ""]
        if what[1] == "kill" and what[2] == rank:
            ahead[0].rename(self.plan / f"done-{ahead[0].name}")
            os.kill(os.getpid(), signal.SIGKILL)
        elif what[1] == "stop" and rank == "0":
            ahead[0].rename(self.plan / f"done-{ahead[0].name}")
            (Path(os.environ["DURE_RUN"]) / "stop").touch()


def model(plan):
    return Net(plan)
