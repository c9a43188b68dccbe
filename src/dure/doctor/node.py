"""The doctor's part on one node: answers questions, over `base.lines`, until its standard input ends.

The first question is `look`, with the node's name and the plan; the others build on it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

from dure.base.in_image import digest_inside
from dure.base.lines import LineError, Lines, decode, encode
from dure.doctor.checks import bucket, machine, names, storage, versions
from dure.doctor.checks.network import Listener, call
from dure.doctor.finding import Finding, bad
from dure.doctor.plan import JobNeeds

READY = "Ready"
"""The first message of a node. Whatever a login shell prints comes before it."""
ENTERING = "EnteringImage"
"""Sent before it, by a part that is about to enter the job's image."""
ASK, ANSWER = "Ask", "Answer"
_LOOK_AGAIN_SECONDS = 0.2
_FORGOTTEN_SECONDS = 600
"""When nothing was asked for so long, the cable to whoever asked is out, and nobody will hang up."""


def serve(outside: str | None = None) -> None:
    """Answer on standard output what is asked on standard input, until that ends, or nobody asks any more.

    `outside`: why it could not go into the job's image, and looks from outside of it.
    """
    for number in (signal.SIGALRM, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _end)
    doctor = Lines(0, os.dup(1))
    os.dup2(2, 1)  # whatever else is printed must not get between the answers
    doctor.send(encode(READY))
    node = NodePart(outside)
    try:
        while True:
            signal.alarm(_FORGOTTEN_SECONDS)  # for the answer, too
            doctor.flush(_FORGOTTEN_SECONDS)
            _, question = decode(doctor.next(_FORGOTTEN_SECONDS))
            doctor.send(encode(ANSWER, node.answer(question.pop("ask", ""), question)))
    except LineError:  # the doctor has ended, or is nobody who asks as it does
        pass
    finally:
        node.close()


def _end(number: int, _: object) -> NoReturn:
    """Not at once, but over `finally`: marks are taken away."""
    raise SystemExit(128 + number)


class NodePart:
    """What a node knows of itself between two questions."""

    def __init__(self, outside: str | None = None) -> None:
        self._outside = outside
        self._name = ""
        self._token = ""
        self._plan = JobNeeds()
        self._address: str | None = None
        self._listener: Listener | None = None
        self._asked: dict[str, Callable[..., Any]] = {
            "look": self.look,
            "time": time.time,
            "seen": self.seen,
            "call": self.call,
        }

    def answer(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """What is asked for, or why there is no answer."""
        try:
            return {"answer": self._asked[name](**values)}
        except Exception as error:  # whatever it is, the doctor shows it beside this node's name
            return {"error": f"{type(error).__name__}: {error}"}

    def look(self, node: str, token: str, plan: dict[str, Any]) -> dict[str, Any]:
        """Check what can be checked here alone; leave a mark in the storage and listen, for the others to find."""
        self._name, self._token, self._plan = node, token, JobNeeds.from_json(plan)
        if self._outside is not None:  # what refuses to be written is the image's business
            self._plan = replace(self._plan, refuses=())
        findings, self._address = local_findings(self._plan, node, token)
        if self._outside is not None:
            findings.append(bad("image", node, "image.closed", reason=self._outside))
        if self._address is not None:
            self._listener = Listener(self._address, self._plan.port, token)
            if self._listener.taken:
                findings.append(bad("network", node, "network.taken", port=self._plan.port))
        return {
            "findings": [finding.to_json() for finding in findings],
            "wrote": _written(self._plan, findings),
            # Outside of the image there are others, which no rank will use.
            "versions": versions.versions() if self._outside is None else None,
            "cpu": versions.cpu_capability(),
            "digests": versions.digests(self._plan.files) | _own_image(),
            "address": self._address,
            "ports": self._listener.ports if self._listener is not None else [],
        }

    def seen(self, place: str, writers: list[str], seconds: float) -> list[str]:
        """Whose marks are to be seen here; waits a while for those that are late, as file servers' caches are."""
        look = bucket.seen if place == self._plan.saves else storage.seen
        deadline = time.monotonic() + seconds
        while True:
            found = look(self._plan, self._token, writers)
            if len(found) == len(writers) or time.monotonic() > deadline:
                return found
            time.sleep(_LOOK_AGAIN_SECONDS)

    def call(self, address: str, ports: list[int]) -> list[dict[str, Any]]:
        """Connect to another node, and measure."""
        assert self._address is not None
        return list(call(self._address, address, ports, self._token))

    def close(self) -> None:
        """Leave nothing behind."""
        storage.forget(self._plan, self._name, self._token)
        bucket.forget(self._plan, self._name, self._token)
        if self._listener is not None:
            self._listener.close()


def local_findings(plan: JobNeeds, node: str, token: str) -> tuple[list[Finding], str | None]:
    """What a node finds by itself, and the address that its ranks will talk from. Leaves a mark in the storage."""
    findings = []
    if plan.storage is not None:
        findings.append(storage.there(plan, node))
    findings += _in_buckets(plan, node, token)
    if plan.refuses:
        findings.append(storage.refuses(plan, node))
    if plan.writable is not None:
        findings.append(storage.takes(plan, node, token))
        findings += storage.space(plan, node)
    findings.append(machine.shared_memory(plan, node))
    findings.append(machine.open_files(plan, node))
    if plan.ranks:
        findings.append(machine.cores(plan, node))
    address = None
    if plan.several:
        findings.append(names.host_name(plan, node))
        chosen, address = names.interface(plan, node)
        findings.append(chosen)
    return findings, address


def _in_buckets(plan: JobNeeds, node: str, token: str) -> list[Finding]:
    findings = []
    if plan.bucket is not None or any("://" in path for path in plan.needs):
        findings.append(bucket.there(plan, node))
    # A server that does not let us read would only say so again, and late.
    readable = all(found.words in ("storage.there", "storage.lacks") for found in findings)
    if plan.saves is not None and readable:
        findings.append(bucket.takes(plan, node, token))
    return findings


def _written(plan: JobNeeds, findings: Iterable[Finding]) -> list[str]:
    """The places in which this node has left a mark."""
    taken = {found.words for found in findings if found.check == "read_write" and found.level == "ok"}
    places = {"read_write.takes": plan.writable, "read_write.puts": plan.saves}
    return [place for words, place in places.items() if words in taken and place is not None]


def _own_image() -> dict[str, str | None]:
    """The image that this process is in, whose file may well be out of its sight."""
    inside = digest_inside()
    return {} if inside is None else {"image": inside}
