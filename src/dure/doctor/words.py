"""A finding in words, in both languages, and the headings of the table that it is in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dure.base.language import Language
from dure.doctor.finding import Finding
from dure.doctor.sentences import SENTENCES

TITLES: dict[Language, dict[str, str]] = {
    "en": {
        "check": "check",
        "nodes": "nodes",
        "found": "found",
        "fix": "what to do",
        "all": "all",
        "matrix": "from ↓ to →",
        "failed": "preflight failed on {nodes}: {checks}",
    },
    "ko": {
        "check": "검사",
        "nodes": "노드",
        "found": "결과",
        "fix": "해결 방법",
        "all": "모두",
        "matrix": "보내는 쪽 ↓ 받는 쪽 →",
        "failed": "사전 점검 실패, 노드 {nodes}: {checks}",
    },
}

HEADINGS: dict[Language, dict[str, str]] = {
    "en": {
        "reach": "reached",
        "image": "image",
        "versions": "versions",
        "cpu": "instructions",
        "digests": "same files",
        "storage": "storage",
        "both_ways": "storage both ways",
        "read_only": "read-only",
        "read_write": "read-write",
        "space": "free space",
        "shm": "/dev/shm",
        "files": "open files",
        "clock": "clock",
        "name": "host name",
        "interface": "interface",
        "cores": "cores",
        "network": "network",
    },
    "ko": {
        "reach": "연결",
        "image": "이미지",
        "versions": "버전",
        "cpu": "명령어 집합",
        "digests": "같은 파일",
        "storage": "저장소",
        "both_ways": "저장소 양방향",
        "read_only": "읽기 전용",
        "read_write": "읽기·쓰기",
        "space": "남은 공간",
        "shm": "/dev/shm",
        "files": "열린 파일 수",
        "clock": "시계",
        "name": "호스트 이름",
        "interface": "인터페이스",
        "cores": "코어",
        "network": "네트워크",
    },
}


def value_of(finding: Finding, language: Language) -> str:
    """What was found, in words."""
    return _filled(SENTENCES[language][finding.words][0], finding)


def fix_of(finding: Finding, language: Language) -> str:
    """What to do about it; empty where there is nothing to do."""
    return _filled(SENTENCES[language][finding.words][1], finding)


def in_one_line(finding: Finding, language: Language) -> str:
    """The check, what was found and what to do, for a message."""
    fix = fix_of(finding, language)
    return f"{HEADINGS[language][finding.check]}: {value_of(finding, language)}" + (
        f" ({fix})" if fix else ""
    )


def _filled(sentence: str, finding: Finding) -> str:
    values: Mapping[str, Any] = {"node": finding.node, **finding.values}
    return sentence.format_map({name: _Shown(value) for name, value in values.items()})


class _Shown:
    """A value that can be shown as a size, a rate or a short time."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __format__(self, how: str) -> str:
        return _WAYS[how](self._value) if how in _WAYS else format(self._value, how)


def _size(count: float) -> str:
    unit, name = next(
        (unit, name)
        for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, "B"))
        if count >= unit or unit == 1
    )
    return f"{count / unit:.{0 if unit == 1 else 1}f} {name}"


_WAYS: dict[str, Callable[[Any], str]] = {
    "size": _size,
    "rate": lambda value: f"{value * 8e-9:.2f} Gbit/s",
    "micro": lambda value: f"{value * 1e6:.0f} µs",
}
