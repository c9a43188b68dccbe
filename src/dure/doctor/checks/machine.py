"""The machine under a node: shared memory, limits, cores."""

from __future__ import annotations

import os

from dure.base.open_files import UNLIMITED, limits
from dure.doctor.finding import Finding, bad, good, note
from dure.doctor.plan import JobNeeds

_SHM = "/dev/shm"


def shared_memory(plan: JobNeeds, node: str) -> Finding:
    """Whether the gradients of all ranks fit into shared memory."""
    try:
        about = os.statvfs(_SHM)
    except OSError as error:
        return bad("shm", node, "shm.gone", reason=error.strerror)
    free = about.f_bavail * about.f_frsize
    values = {"free": free, "need": plan.shm_bytes}
    if free < plan.shm_bytes:
        return bad("shm", node, "shm.small", **values)
    return good("shm", node, "shm.free", **values)


def open_files(plan: JobNeeds, node: str) -> Finding:
    """Whether a process may have enough files open: connections, shared memory, samples.

    What counts is the hard limit: a run raises the other one by itself.
    """
    soft, hard = limits()
    if hard < plan.open_files:
        return bad("files", node, "files.few", hard=hard, need=plan.open_files)
    if soft < plan.open_files:
        return good("files", node, "files.raised", soft=soft, need=plan.open_files)
    return good("files", node, "files.enough", soft="∞" if soft == UNLIMITED else soft, need=plan.open_files)


def cores(plan: JobNeeds, node: str) -> Finding:
    """Whether there is a core for every thread of every rank. Too few is slow, never wrong."""
    have, want = len(os.sched_getaffinity(0)), plan.ranks * plan.threads
    values = {"cores": have, "ranks": plan.ranks, "threads": plan.threads}
    if have < want:
        return note("cores", node, "cores.few", **values)
    if have >= 2 * want:
        return note("cores", node, "cores.idle", **values)
    return good("cores", node, "cores.enough", **values)
