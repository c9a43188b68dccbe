"""State that every process has of its own, and that a fork would copy: random numbers, keys, places.

`random`, `uuid`, `secrets`, `tempfile`'s names and OpenSSL look after themselves: they ask the system each time, or
notice that the process is another one. What is renewed here does not. The seed of `hash` cannot be: it is in every
dictionary that was made before the fork, and all ranks of a node share it.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import tempfile


def renew() -> None:
    """Make this process's state its own, as if its interpreter had just started. Call it right after the fork."""
    multiprocessing.process.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None  # found anew, from this process's environment
    # torch seeds its default generator by chance when it is loaded, numpy its global one when it is imported.
    # Not `torch.seed()`: that would give all devices one seed, and a fresh process's devices have one each.
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "sympy.core.symbol" in sys.modules:  # torch imports it
        sys.modules["sympy.core.random"].rng.seed()
        sys.modules["sympy.core.random"]._assumptions_rng.seed()
        sys.modules["sympy.core.symbol"].Dummy._prng.seed()
