"""The small things of a team, on every rank."""

import io
import sys
from contextlib import redirect_stdout

import torch

import dure
from dure.base.errors import DureError


def said(call):
    try:
        return call()
    except DureError as error:
        return f"{type(error).__name__}: {error}"


def try_all(folder):
    """Entry point of a rank."""
    called = []
    with dure.start(seed=1) as team:
        last = team.topology.size - 1
        printed = io.StringIO()
        with redirect_stdout(printed):
            team.print("only", "once", sep="-")
        team.barrier()
        found = {
            "printed": printed.getvalue(),
            "device": team.device.type,
            "gathered": team.gather({"rank": team.rank, "list": [1.5, None, "한글"]}),
            "tensor": said(lambda: team.gather(torch.ones(2))),
            "tuple": said(lambda: team.gather((1, 2))),
            "one rank's tuple": said(lambda: team.gather((1, 2) if team.rank == last else [1, 2])),
            "on leader": team.on_leader(lambda x, y: called.append(x) or [x, y, team.rank], 7, y="a"),
            "raised": said(lambda: team.on_leader(sys.intern, 3)),
            "no log": said(lambda: team.log({"loss": 1.0}, step=0)),
            "unknown logger": said(lambda: team.log_to("excel", folder=folder)),
        }
        team.log_to("csv", folder=folder)
        for step in range(3):
            team.log({"loss": torch.tensor(1.0 / (step + 1)), "rank": team.rank}, step=step)
        found["twice"] = said(lambda: team.log_to("csv", folder=folder))
    return {**found, "called": called}
