"""Memory that one step frees serves the next, without the kernel."""

import os
import subprocess
import sys

FAULTS = """
import resource, sys
import torch
from dure.device.host_memory import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    print("impossible")
    sys.exit()

def step():
    held = [torch.ones(1 << 18) for _ in range(8)]  # 1 MiB each
    return sum(one[0] for one in held)

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how, **variables):
    """Pages that the kernel had to provide in 20 steps of 8 MiB."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


def test_freed_memory_is_kept_for_the_next_step():
    assert int(faults("kept")) < 2048 < int(faults("default"))  # one step touches 2048 pages


def test_the_users_own_setting_comes_first():
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="131072") == "impossible"
