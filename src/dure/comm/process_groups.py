"""References to process groups, so that torch never destroys one at a moment when it would hang.

`ProcessGroupGloo`'s destructor waits for its threads. A thread that has just finished an all-reduce of a backward pass
needs the GIL for a moment (it drops the context that autograd left with the work). torch lets go of the GIL when the
last reference to a group is Python's, but not when it is the one that `DistributedDataParallel`'s reducer has: that
happens to a script that calls `destroy_process_group` while its model is still there, or that ends without, and then
neither side moves again (a case of https://github.com/pytorch/pytorch/issues/56297).

So a reference of Python's is kept to every group from its making on, and dropped when the model is gone. torch tells
nobody that it makes a group, but it enters all of them into one dictionary: that is replaced by one that takes note.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

_SETTLE_SECONDS = 2.0
_LOOK_SECONDS = 0.006
"""Longer than the 5 ms after which a thread that wants the GIL asks for it."""


def _references(held: list[Any]) -> int:
    return sys.getrefcount(held[0])


_ALONE = _references([object()])
"""References to what nobody has but a list of one: how many are counted depends on the interpreter."""


class _Noted(dict[Any, Any]):
    """A dictionary by process group that keeps its keys for as long as anybody else in Python has them."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self._kept = list(entries)

    def __setitem__(self, group: Any, value: Any) -> None:
        self.drop_unused()
        self._kept.append(group)
        super().__setitem__(group, value)

    def drop_unused(self) -> None:
        """Drop the groups whose models are gone; a model has a reference to its group, like everybody who uses it."""
        kept, self._kept = self._kept, []
        while kept:
            last = [kept.pop()]
            if _references(last) > _ALONE:
                self._kept.insert(0, last[0])
            last.clear()  # an unused one is destroyed here, where the last reference is Python's


def keep_process_groups() -> None:
    """From now on, keep process groups until they can be destroyed. Call it with torch imported, before the script."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    entries = getattr(module, "_pg_map", None)
    if module is None or type(entries) is not dict:  # a torch that does it otherwise
        return
    noted = _Noted(entries)
    module._pg_map = noted  # type: ignore[attr-defined]
    # The dictionary of `sys` is cleared after all other modules, and their models, are gone.
    sys._dure_process_groups = noted  # type: ignore[attr-defined]
    atexit.register(_before_the_end, noted)  # before all that the script registers, so it is called after it


def _before_the_end(noted: _Noted) -> None:
    noted.drop_unused()
    if noted._kept:
        _let_threads_finish()


def _let_threads_finish() -> None:
    """Wait, without the GIL, until no Gloo thread moves: none may want the GIL of an interpreter that is ending."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    before: list[str] = ["not looked yet"]
    while time.monotonic() < deadline:
        now = _gloo_threads()
        if now == before and not any(" R " in thread for thread in now):
            return
        before = now
        time.sleep(_LOOK_SECONDS)


def _gloo_threads() -> list[str]:
    """Each with its number, its state, and how often it has gone to sleep: one that has not moved reads the same."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
        except OSError:  # it has ended
            continue
        if fields["Name"].strip() == "pt_gloo_runloop":
            state, switches = fields["State"].split()[0], fields["voluntary_ctxt_switches"].strip()
            found.append(f"{thread} {state} {switches}")
    return found
