"""Nodes of Slurm for a short while: those that this process was given already, or some of our own, given back always.

`salloc` holds nodes for as long as a command of its own runs. Here that command waits for the end of a pipe from this
process: however this process ends, by Ctrl-C or by `kill -9`, the pipe ends, and Slurm has its nodes back.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from dure.base.errors import DureError
from dure.base.lines import LineError, Lines
from dure.base.slurm_lists import expand_hosts
from dure.engine.slurm import queue
from dure.engine.slurm.request import Request

_HOLD = 'printf "%s %s\\n" "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST"; read -r end'
_LEAST_MINUTES = 10
"""How long the nodes may be held at most, should salloc itself be killed."""
_LATE_SECONDS = 30.0
"""A busy controller may answer so much later than it was told to."""
_RETURN_SECONDS = 10.0
_LAST_WORDS = 2000
_OF_THE_SCRIPT = (
    *("batch", "begin", "deadline", "dependency", "export", "export-file", "ignore-pbs", "input"),
    *("hold", "kill-on-invalid-dep", "mail-type", "mail-user", "propagate", "wait-all-nodes"),
)
"""Options of sbatch that say something of the batch script, or of when it runs, and nothing of its nodes."""
_SHORT_OF_THE_SCRIPT = "bdHi"


@dataclass(frozen=True)
class Allocation:
    """Nodes on which steps can be started."""

    job_id: int
    nodes: tuple[str, ...]
    """By the names that Slurm has for them; the first leads."""
    addresses: tuple[str, ...]
    """Where the others reach each of them, as Slurm has it."""

    def step(
        self, node: str, command: Sequence[str], *, cpus: int | None = None, options: Sequence[str] = ()
    ) -> list[str]:
        """The command line that runs `command` on one node, beside whatever else runs there."""
        return [
            *("srun", "--quiet", f"--jobid={self.job_id}", "--overlap", f"--nodelist={node}"),
            *("--nodes=1", "--ntasks=1", "--chdir=/"),
            *([] if cpus is None else [f"--cpus-per-task={cpus}"]),
            *options,
            *command,
        ]


def is_here() -> bool:
    """Whether Slurm's commands are."""
    return queue.has("srun") and queue.has("salloc")


def is_inside(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is in a job of Slurm."""
    return environ.get("SLURM_JOB_ID", "").isdigit() and "SLURM_JOB_NODELIST" in environ


def held_already(environ: Mapping[str, str] = os.environ) -> Allocation:
    """The nodes of the job of Slurm that this process is in."""
    return _found(int(environ["SLURM_JOB_ID"]), environ["SLURM_JOB_NODELIST"])


@contextlib.contextmanager
def hold(request: Request, wait_seconds: int) -> Iterator[Allocation]:
    """Nodes as the request wants them, if Slurm gives them in time; they are given back at the end."""
    queue.need("salloc")
    name = f"dure-{uuid.uuid4().hex[:16]}"
    began = time.monotonic()  # before salloc's own clock
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            salloc_words(request, name, wait_seconds),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=queue.outside_environment(),
            start_new_session=True,  # Ctrl-C is for this process, which gives the nodes back
        )
        granted = False
        try:
            job, nodes = _wait_for_nodes(process, errors, request, began, wait_seconds)
            granted = True
            yield _found(job, nodes)
        finally:
            _give_back(process, name, granted=granted)


def salloc_words(request: Request, name: str, wait_seconds: int) -> list[str]:
    """The command line that holds nodes like those that the batch script will be given."""
    fewest, most = request.min_nodes, request.nodes
    values = {
        "job-name": name,
        "immediate": str(wait_seconds),
        "time": str(_LEAST_MINUTES + -(-wait_seconds // 60)),
        "nodes": f"{fewest}-{most}" if fewest < most else str(most),
        "ntasks-per-node": None if fewest < most else "1",
        "cpus-per-task": str(request.cpus_per_node),
        "gres": f"gpu:{request.gpus_per_node}" if request.gpus_per_node else None,
        "partition": request.partition,
        "account": request.account,
    }
    return [
        *("salloc", "--quiet", "--no-bell"),
        *(f"--{option}={value}" for option, value in values.items() if value is not None),
        *(option for option in request.options if _is_of_nodes(option)),
        *("sh", "-c", _HOLD),
    ]


def _is_of_nodes(option: str) -> bool:
    if not option.startswith("--"):
        return option[1] not in _SHORT_OF_THE_SCRIPT
    name = option[2:].partition("=")[0]
    return not any(other.startswith(name) for other in _OF_THE_SCRIPT)


def _wait_for_nodes(
    process: subprocess.Popen[str], errors: IO[bytes], request: Request, began: float, wait_seconds: int
) -> tuple[int, str]:
    """The job's number and its nodes, once they are there; or why they are not."""
    assert process.stdout is not None
    with contextlib.suppress(LineError):
        told = (
            Lines(process.stdout.fileno(), None).next(wait_seconds + _LATE_SECONDS).decode(errors="replace")
        )
        if found := re.fullmatch(r"([0-9]+) (\S+)", told):
            return int(found[1]), found[2]
    nodes = f"{request.nodes} node{'s' if request.nodes > 1 else ''}"
    if time.monotonic() - began >= wait_seconds:
        raise DureError(
            f"Slurm had no {nodes} free within {wait_seconds} s; `squeue` shows who has them, and --wait SECONDS "
            "waits longer"
        )
    errors.seek(0)
    said = errors.read()[-_LAST_WORDS:].decode(errors="replace").strip().splitlines()
    raise DureError(
        f"Slurm refused {nodes}: {'; '.join(said) or 'salloc ended without a word'}; [slurm] in the job says what is "
        "asked for"
    )


def _give_back(process: subprocess.Popen[str], name: str, *, granted: bool) -> None:
    """End salloc, and with it what it holds or still waits for."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.stdout.close()
    try:
        # One that still waits in the queue does not look at the pipe.
        process.wait(_RETURN_SECONDS if granted else 0.1)
    except subprocess.TimeoutExpired:
        # By its name, as one that still waits has not told its number. Not by a signal to salloc, which, when its
        # command ends just then, waits for it for ever (22.05).
        words = ["scancel", "--quiet", f"--name={name}"]
        try:
            queue.call(words)
        except DureError as error:
            raise DureError(
                f"the nodes may not have been given back: {error}; `{' '.join(words)}` does it"
            ) from None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_RETURN_SECONDS)
        process.kill()
        process.wait()


def _found(job_id: int, node_list: str) -> Allocation:
    """The nodes in their order, the first of which leads in the batch script too."""
    names = tuple(expand_hosts(node_list))
    asked = queue.call(["scontrol", "show", "node", "--oneliner", node_list])
    if asked.returncode != 0:
        raise DureError(f"scontrol does not know {node_list}: {(asked.stderr or asked.stdout).strip()}")
    known = dict(re.findall(r"^NodeName=(\S+) .*? NodeAddr=(\S+) ", asked.stdout, re.MULTILINE))
    return Allocation(job_id, names, tuple(known.get(name, name) for name in names))
