"""Memory that outlives the ranks: files without a name, held open by the launcher.

The launcher never looks into them: ranks map them through `/proc/<launcher>/fd`, fill them and find them
again after a restart (`dure.checkpoint.memory_tier`). The kernel frees them when the launcher is gone, however it ends.
"""

from __future__ import annotations

import os
from types import TracebackType

from dure.comm.topology import KEEP_VARIABLE

_SLOTS = 2
"""The last state and the one before: while one is written, the other is whole."""


class StateMemory:
    """Empty files; ranks make them as long as they need them."""

    def __init__(self) -> None:
        self._descriptors = [os.memfd_create(f"dure-state-{slot}", os.MFD_CLOEXEC) for slot in range(_SLOTS)]
        for descriptor in self._descriptors:
            os.fchmod(descriptor, 0o600)

    @property
    def environment(self) -> dict[str, str]:
        """What tells ranks where to find them."""
        return {KEEP_VARIABLE: ":".join(map(str, (os.getpid(), *self._descriptors)))}

    def __enter__(self) -> StateMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
