"""The report to read, in both languages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dure.base.language import Language
from dure.tools.selftest.result import Check, Report

_SIGNS = {"pass": "✓", "fail": "✗", "skipped": "·"}
_WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "title": "dure {dure} on {host}: {verdict} in {seconds:.0f} s",
        "machine": "{ranks} rank(s) · {device} · torch {torch} · {cpu}, {cores} core(s)",
        "driver": "driver {driver}",
        "pass": "all that could be tried is right",
        "fail": "something is wrong",
        "devices": "devices",
        "same_bits": "same bits on 1 … N ranks, twice, three jobs",
        "exchange": "exchange against the CPU's tree",
        "sanitizer_default_stream": "CUDA Sanitizer, default stream",
        "sanitizer_own_stream": "CUDA Sanitizer, a stream of one's own",
        "overlap": "exchange beside the backward pass",
        "host_waits": "host waits per step",
        "against_backend": "exchange against all_reduce",
        "load": "loading, GB/s",
        "checkpoint": "a checkpoint stalls a step",
        "kill_and_resume": "a rank is killed, the team goes on",
    },
    "ko": {
        "title": "{host}의 dure {dure}: {seconds:.0f}초 만에 {verdict}",
        "machine": "랭크 {ranks}개 · {device} · torch {torch} · {cpu}, 코어 {cores}개",
        "driver": "드라이버 {driver}",
        "pass": "시험할 수 있는 것은 모두 맞음",
        "fail": "틀린 것이 있음",
        "devices": "장치",
        "same_bits": "랭크 1 … N개에서 두 번씩, 세 작업이 같은 비트",
        "exchange": "교환을 CPU의 트리와 비교",
        "sanitizer_default_stream": "CUDA Sanitizer, 기본 스트림",
        "sanitizer_own_stream": "CUDA Sanitizer, 자체 스트림",
        "overlap": "역전파와 겹치는 교환",
        "host_waits": "스텝마다 호스트가 기다리는 횟수",
        "against_backend": "교환과 all_reduce 비교",
        "load": "불러오기, GB/s",
        "checkpoint": "체크포인트가 스텝을 멈추는 시간",
        "kill_and_resume": "랭크 하나를 죽여도 팀이 이어감",
    },
}


def text_of(report: Report, language: Language) -> str:
    """One line per check; what is wrong, or why it was skipped, beside it."""
    words, machine = _WORDS[language], report.machine
    head = [
        words["title"].format(**machine, verdict=words[report.verdict], seconds=report.seconds),
        words["machine"].format(**machine),
        *([words["driver"].format(**machine)] if machine["driver"] else []),
        "",
    ]
    rows = [f"  {_SIGNS[one.verdict]} {words[one.name]}{_beside(one)}" for one in report.checks]
    return "\n".join([*head, *rows])


def _beside(check: Check) -> str:
    if check.why:
        return f": {check.why}"
    told = _FIGURES.get(check.name)
    return f": {told(check.figures)}" if told is not None and check.figures else ""


def _of_backend(figures: dict[str, Any]) -> str:
    ours, theirs = figures["exchange_ms"], figures["all_reduce_ms"]
    return f"{figures['mib']:.0f} MiB in {ours} ms, all_reduce {theirs} ms"


_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "devices": lambda figures: str(figures["count"]),
    "same_bits": lambda figures: ", ".join(
        f"{name} {hashes[0][:8]}" for name, hashes in figures["weights_sha256"].items()
    ),
    "exchange": lambda figures: f"{figures['exchanges']}",
    "overlap": lambda figures: f"{figures['begun_before_the_backward_pass_ended']} / {figures['exchanges']}",
    "host_waits": lambda figures: str(figures["per_step"]),
    "against_backend": _of_backend,
    "load": lambda figures: ", ".join(f"{how} {one['gb_per_second']}" for how, one in figures.items()),
    "checkpoint": lambda figures: f"{figures['milliseconds']} ms / {figures['mib_per_rank']} MiB",
    "kill_and_resume": lambda figures: str(figures["weights_sha256"])[:16],
}
