"""The self-test itself: teams of 1 … N ranks on this node's devices, and what must be true of what they bring."""

from __future__ import annotations

import os
import platform
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dure import __version__
from dure.base.errors import DureError
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.tools.selftest.result import Check, Report

MOST_RANKS = 8
HOST_RANKS = 3
"""On the CPU; an odd number, so that ranks hold several subtrees."""
_ENTRY = "dure.tools.selftest.in_ranks"
_HANG_SECONDS = 60.0

Say = Callable[[str], None]
_SKIPPED = {
    "overlap": "one rank exchanges nothing, and on busy cores nothing can overlap",
    "host_waits": "torch cannot count the waits for this kind of device",
    "against_backend": "one rank exchanges nothing",
}


def self_test(*, device: str = "auto", ranks: int | None = None, say: Say = lambda text: None) -> Report:
    """Try everything that this node can; whatever cannot be tried is skipped, and says why."""
    began = time.perf_counter()
    machine = machine_words(device)
    most = ranks or min(int(machine["devices"]) or HOST_RANKS, MOST_RANKS)
    with tempfile.TemporaryDirectory(prefix="dure-selftest-") as folder:
        tried = _Teams(device, Path(folder), most, say)
        checks = (Check("devices", "pass", "", {"count": machine["devices"]}), *tried.checks())
        machine["ranks"] = most
        machine["device"] = tried.device
        machine["described"] = tried.described
    return Report(machine, checks, time.perf_counter() - began)


def machine_words(device: str) -> dict[str, Any]:
    """What this node is, without taking a device into use: that is the ranks' business."""
    import torch

    from dure.device.node import node_words

    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "dure": __version__,
        "torch": torch.__version__,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        **node_words(device),
    }


class _Teams:
    """The teams that are started, and what follows from what they return."""

    def __init__(self, wanted: str, folder: Path, most: int, say: Say) -> None:
        self._wanted, self._folder, self._most, self._say = wanted, folder, most, say
        self.device = "cpu"
        self.described: dict[str, Any] = {}
        self._found: dict[int, list[dict[str, Any]]] = {}
        """What all ranks brought, by their number."""

    def checks(self) -> Iterator[Check]:
        """In the order of the report."""
        self._make_file()
        trouble = ""
        for ranks in range(1, self._most + 1):
            self._say(f"{ranks} of {self._most} rank(s)")
            try:
                self._found[ranks] = self._team("whole", ranks, str(self._folder), ranks == self._most)
            except DureError as error:
                trouble = f"{ranks} rank(s): {error}"
                break
        told = self._found.get(self._most, [{}])[0]
        last = next(iter(self._found.values()), [{}])[0]
        self.device, self.described = last.get("device", "cpu"), last.get("described", {})
        yield self._same_bits(trouble)
        yield self._exchange(trouble)
        yield from self._sanitizer()
        yield self._judged("overlap", told, trouble, self._overlap)
        yield self._judged("host_waits", told, trouble, self._host_waits)
        yield self._judged("against_backend", told, trouble, self._against_backend)
        yield self._judged("load", told, trouble, self._load)
        yield self._judged("checkpoint", told, trouble, lambda figures: "")
        yield self._recovery()

    def _team(
        self,
        entry: str,
        ranks: int,
        *args: object,
        restarts: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        runs = RunFolder(self._folder / f"{entry}-{ranks}-{len(list(self._folder.iterdir()))}")
        kept = {name: os.environ.get(name) for name in environment or {}}
        os.environ.update(environment or {})
        try:
            return run_team(
                f"{_ENTRY}:{entry}",
                (self._wanted, *args),
                ranks=ranks,
                folder=runs,
                max_restarts=restarts,
                hang_seconds=_HANG_SECONDS,
            )
        finally:
            for name, value in kept.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def _make_file(self) -> None:
        import torch

        from dure.checkpoint.snapshot import header_of
        from dure.checkpoint.state import Table
        from dure.device.fingerprint import raw_bytes, weights_sha256
        from dure.tools.selftest.in_ranks import large

        torch.manual_seed(5)
        model = large()
        weights = model.state_dict()
        table = Table.of((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items())
        with (self._folder / "large.safetensors").open("wb") as file:
            file.write(header_of((span, 0, span.numel) for span in table.spans))
            for span in table.spans:
                file.write(raw_bytes(weights[span.name]))
        (self._folder / "large.sha256").write_text(weights_sha256(model))

    def _same_bits(self, trouble: str) -> Check:
        """All ranks of all teams, both times."""
        if trouble:
            return Check("same_bits", "fail", trouble)
        hashes: dict[str, set[str]] = {}
        for everyones in self._found.values():
            for rank in everyones:
                for turn in rank["jobs"]:
                    for name, sha in turn.items():
                        hashes.setdefault(name, set()).add(sha)
        odd = [name for name, seen in hashes.items() if len(seen) > 1]
        figures = {"ranks": list(self._found), "weights_sha256": {n: sorted(s) for n, s in hashes.items()}}
        if odd:
            return Check("same_bits", "fail", f"other bits in {', '.join(odd)}", figures)
        return Check("same_bits", "pass", "", figures)

    def _exchange(self, trouble: str) -> Check:
        ran = [rank["exchange"] for everyones in self._found.values() for rank in everyones]
        if not ran:
            return Check("exchange", "fail", trouble)
        figures = {
            "exchanges": sum(one["exchanges"] for one in ran),
            "ranks_without_pieces": max(one["ranks_without_pieces"] for one in ran),
        }
        wrong = [one["wrong"] for one in ran if one["wrong"]]
        if wrong:
            return Check("exchange", "fail", f"other bits than the CPU's tree: {wrong[0]}", figures)
        return Check("exchange", "pass", "", figures)

    def _sanitizer(self) -> Iterator[Check]:
        from dure.device.node import sanitizer_environment

        for name, own in (("sanitizer_default_stream", False), ("sanitizer_own_stream", True)):
            environment = sanitizer_environment(self.device.partition(":")[0])
            if not environment:
                yield Check(name, "skipped", "torch's sanitizer knows CUDA alone")
                continue
            self._say(name)
            try:
                self._team("watched", min(self._most, 2), own, environment=environment)
            except DureError as error:
                yield Check(name, "fail", str(error))
            else:
                yield Check(name, "pass")

    def _judged(
        self, name: str, told: dict[str, Any], trouble: str, judge: Callable[[dict[str, Any]], str | None]
    ) -> Check:
        """`judge` says what is wrong with the figures, "" if nothing, None if there was nothing to try."""
        if name not in told:
            return Check(name, "skipped", trouble or "the largest team did not run")
        figures = told[name]
        wrong = judge(figures)
        if wrong is None:
            return Check(name, "skipped", _SKIPPED[name], figures)
        return Check(name, "fail" if wrong else "pass", wrong, figures)

    def _overlap(self, figures: dict[str, Any]) -> str | None:
        early = figures["begun_before_the_backward_pass_ended"]
        if self._most == 1 or (not early and self.device == "cpu"):
            return None
        return "" if early else "no exchange begins before the backward pass has ended"

    @staticmethod
    def _host_waits(figures: dict[str, Any]) -> str | None:
        return None if figures["per_step"] is None else ""

    def _against_backend(self, figures: dict[str, Any]) -> str | None:
        return None if self._most == 1 else ""

    @staticmethod
    def _load(figures: dict[str, Any]) -> str:
        odd = [how for how, one in figures.items() if not one["same_bytes"]]
        return f"other bytes than the file's by {', '.join(odd)}" if odd else ""

    def _recovery(self) -> Check:
        """A rank is killed, and the team goes on from what was kept, to the undisturbed run's bits."""
        if self._most == 1:
            return Check("kill_and_resume", "skipped", "one rank is the whole team")
        self._say("a rank is killed")
        ranks = min(self._most, 3)
        try:
            plain = self._team("killed_once", ranks, str(self._folder / "plain"), False)
            killed = self._team("killed_once", ranks, str(self._folder / "killed"), True, restarts=1)
        except DureError as error:
            return Check("kill_and_resume", "fail", str(error))
        figures = {"weights_sha256": plain[0], "after_the_kill": killed[0]}
        if {*plain, *killed} != {plain[0]}:
            return Check("kill_and_resume", "fail", "other bits after the restart", figures)
        return Check("kill_and_resume", "pass", "", figures)


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return platform.machine()
    return found[1] if found else platform.machine()
