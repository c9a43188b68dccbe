"""What runs in a pod: one node's part of a run, and the request to save when the pod is to end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dure.base.errors import PeerLost, Resumable, UsageError
from dure.base.files import open_own, read_at_most
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.base.team_key import TeamKey
from dure.engine.node_start import NodeStart, start_node
from dure.launch.nodes.address import resolve, split_leader
from dure.launch.stop import StopSignals

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Set by Kubernetes in the pods of an Indexed Job."""
ADDRESS_VARIABLE = "POD_IP"
"""Set by the manifest."""
_LOOK_SECONDS = 1.0
_LONGEST_KEY = 4096
_LEAST_KEY = 12


def start_in_pod(start: NodeStart, key_file: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Do this pod's part. `start.leader` is the name of the pod with index 0, which leads, and its port."""
    assert start.leader is not None
    node = _index(environ)
    key = read_mounted_key(key_file)
    host, port = split_leader(start.leader)
    if node == 0:
        host = environ.get(ADDRESS_VARIABLE, "")
        if not host:
            raise UsageError(
                f"{ADDRESS_VARIABLE} is not set; this command is for pods of `dure submit --engine kubernetes`"
            )
    else:
        with StopSignals() as stop:
            wait_for_name(host, start.loaded.job.cluster.join_seconds, stop.check)
    try:
        start_node(replace(start, node_rank=node, leader=f"{host}:{port}"), key)
    except PeerLost as lost:
        # Its pod may be waiting for a machine: Kubernetes starts this one again, and both meet then.
        raise Resumable(f"{lost} Resumable: Kubernetes starts this pod again") from None


def wait_for_name(
    host: str,
    seconds: float,
    check: Callable[[], None] = lambda: None,
    look_up: Callable[[str], str] = resolve,
) -> str:
    """The address of a pod whose name DNS may not know yet: it comes some time after the pod has an address."""
    deadline = time.monotonic() + seconds
    told = False
    while True:
        check()
        try:
            return look_up(host)
        except UsageError as error:
            if time.monotonic() > deadline:
                raise Resumable(
                    f"timed out after {seconds:.0f} s waiting for the leader's name {host} in DNS: {error}. Does its "
                    "pod run? Resumable: Kubernetes starts this pod again"
                ) from None
            if not told:
                told = True
                say(f"waits for the leader's name {host} in DNS (up to {seconds:.0f} s)")
        time.sleep(_LOOK_SECONDS)


def read_mounted_key(path: Path) -> TeamKey:
    """The key in a mounted Secret: its owner and mode are Kubernetes', and who may read it is decided by the pod."""
    try:
        text = read_at_most(path, _LONGEST_KEY).decode(errors="replace").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"the team's key cannot be read from {path}: {reason}; is the Secret mounted?"
        ) from None
    if len(text) < _LEAST_KEY:
        raise UsageError(
            f"the team's key in {path} has {len(text)} characters; a key has {_LEAST_KEY} or more"
        )
    return TeamKey.from_text(text)


def save_and_wait(run: Path, pid: int = 1) -> None:
    """Ask the run to save and end, and wait for the end of the pod's first process: when this ends, that gets SIGTERM.

    A run that has not begun has nothing to save, and ends by SIGTERM.
    """
    folder = RunFolder(run)
    if not folder.job.exists():
        return
    with contextlib.suppress(OSError):
        os.close(open_own(folder.stop, os.O_WRONLY | os.O_CREAT))
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(_LOOK_SECONDS)


def _index(environ: Mapping[str, str]) -> int:
    text = environ.get(INDEX_VARIABLE, "")
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{INDEX_VARIABLE} is {text!r} on {socket.gethostname()}; this command is for pods of an Indexed Job, as "
            "`dure submit --engine kubernetes` makes them"
        )
    return int(text)
