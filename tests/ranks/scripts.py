"""A script as a user starts it."""

import os
import subprocess
import sys


def stdout_of(command, **env):
    """What a command prints that must end well."""
    ran = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **env},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def by_hand(script, rank, port, size):
    """One rank, in a terminal of its own."""
    command = [sys.executable, script, "--rank", rank, "--world-size", size, "--master", f"127.0.0.1:{port}"]
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
