"""What this machine can do for a lab."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from dure.base.errors import DureError

SETUP_SECONDS = 30.0
"""Each step of making or ending a place takes milliseconds; after so long it has failed."""

_COMMANDS = ("ip", "tc", "unshare", "nsenter")
_TRY = (
    "ip link add eth0 type veth peer name eth1 && ip link add switch type bridge && "
    "tc qdisc add dev eth0 root tbf rate 1gbit burst 128kb latency 50ms"
)


def why_not_here() -> str | None:
    """Why nodes cannot be made on this machine, or None."""
    if os.geteuid() != 0:
        return "two nodes on one machine take root"
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    try:
        run(["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "sh", "-c", _TRY])
    except DureError as error:
        return f"the kernel refuses: {error}"
    return None


def run(command: Sequence[str], *, text: str | None = None) -> str:
    """What a command printed; it must succeed, and soon."""
    try:
        done = subprocess.run(
            command,
            input=text,
            stdin=None if text is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SETUP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DureError(f"{' '.join(command)} took more than {SETUP_SECONDS:.0f} s") from None
    if done.returncode:
        raise DureError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
