"""Notice a rank of a script that does not end although the others have."""

from __future__ import annotations

import sys
import time

from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.launch.rank import STACKS_OF_SCRIPT
from dure.launch.ranks import Ranks
from dure.launch.stacks import ask_for_stacks

AFTER_SECONDS = (30.0, 300.0, 3600.0)
"""How long after the last end those that are left are named: a script may have much to do on one rank."""


class LeaveWatch:
    """Says which ranks have not ended after others have, with their stacks. It never ends one."""

    def __init__(self, ranks: Ranks, folder: RunFolder) -> None:
        self._ranks = ranks
        self._folder = folder
        self._told = 0

    def look(self) -> None:
        """Say it, if it is time to."""
        ranks = self._ranks
        if not ranks.ended or self._told == len(AFTER_SECONDS):
            return
        seconds = (time.monotonic_ns() - max(ended.at_ns for ended in ranks.ended.values())) / 1e9
        if seconds < AFTER_SECONDS[self._told]:
            return
        self._told += 1
        left = ranks.alive()
        stacks = ask_for_stacks(ranks, self._folder, left, STACKS_OF_SCRIPT)
        for rank in left:
            say(f"rank {rank} has not ended {seconds:.0f} s after the others")
            print(stacks[rank], file=sys.stderr, flush=True)
