"""Ask ranks for the stacks of their threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from dure.base.run_folder import RunFolder
from dure.launch import process_tree
from dure.launch.ranks import Ranks

_ANSWER_SECONDS = 3.0


def ask_for_stacks(ranks: Ranks, folder: RunFolder, who: Sequence[int], signal_number: int) -> dict[int, str]:
    """Return what each of these ranks does: its stacks, or, if it gives none, what the kernel says of it."""
    sizes = {rank: size_of(folder.stacks(rank)) for rank in who}
    # The signal would kill a rank that has no handler for it: one that is another program, or has come to its end.
    asked = [rank for rank in who if process_tree.catches(ranks.pids[rank], signal_number)]
    for rank in asked:
        ranks.send(rank, signal_number)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline and any(size_of(folder.stacks(rank)) <= sizes[rank] for rank in asked):
        time.sleep(0.05)
    time.sleep(0.05)  # all threads of the last one
    return {rank: _answer(ranks, folder, rank, sizes[rank]) for rank in who}


def size_of(path: Path) -> int:
    """The size of a stacks file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _answer(ranks: Ranks, folder: RunFolder, rank: int, before: int) -> str:
    with contextlib.suppress(OSError), folder.stacks(rank).open("rb") as file:
        file.seek(before)
        if text := file.read().decode(errors="replace"):
            return text.rstrip()
    pid = ranks.pids.get(rank)
    with contextlib.suppress(OSError):
        waits_in = Path(f"/proc/{pid}/wchan").read_text()
        return f"it gives no stacks (process {pid}, state {ranks.state(rank)}, waits in {waits_in})"
    return "it gives no stacks"
