"""Notice a rank of a script that does not end although the others have."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.launch import process_tree
from dure.launch.rank import STACKS_OF_SCRIPT
from dure.launch.ranks import Ranks

AFTER_SECONDS = (30.0, 300.0, 3600.0)
"""How long after the last end those that are left are named: a script may have much to do on one rank."""
_ANSWER_SECONDS = 3.0


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
        stacks = self._stacks(left)
        for rank in left:
            say(f"rank {rank} has not ended {seconds:.0f} s after the others")
            print(stacks[rank], file=sys.stderr, flush=True)

    def _stacks(self, left: Sequence[int]) -> dict[int, str]:
        """What each rank does: its stacks, or, if it gives none, what the kernel says of it."""
        sizes = {rank: _size(self._folder.stacks(rank)) for rank in left}
        # The signal would kill a rank that has no handler for it: one that is another program, or has come to its end.
        asked = [rank for rank in left if process_tree.catches(self._ranks.pids[rank], STACKS_OF_SCRIPT)]
        for rank in asked:
            self._ranks.send(rank, STACKS_OF_SCRIPT)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and any(
            _size(self._folder.stacks(rank)) <= sizes[rank] for rank in asked
        ):
            time.sleep(0.05)
        time.sleep(0.05)  # all threads of the last one
        return {rank: self._answer(rank, sizes[rank]) for rank in left}

    def _answer(self, rank: int, before: int) -> str:
        with contextlib.suppress(OSError), self._folder.stacks(rank).open("rb") as file:
            file.seek(before)
            if text := file.read().decode(errors="replace"):
                return text.rstrip()
        pid = self._ranks.pids.get(rank)
        with contextlib.suppress(OSError):
            waits_in = Path(f"/proc/{pid}/wchan").read_text()
            return f"it gives no stacks (process {pid}, state {self._ranks.state(rank)}, waits in {waits_in})"
        return "it gives no stacks"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
