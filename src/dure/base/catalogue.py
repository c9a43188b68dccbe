"""Messages in Korean: finds the template that a finished English message was made from, and fills in the Korean one.

The catalogue is `ko/ROOM.po`, in gettext's form: `msgid` is the template as it is in the source, with its values
numbered (`f"{path} is {size:,} bytes long"` is `{0} is {1} bytes long`), `msgstr` the Korean. Code that raises and
says knows nothing of it. `tests/unit/test_catalogue.py` finds every message of the source and fails if one is missing.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "ko"

_LONGEST = 2000
"""Characters; a longer text is no message, but somebody's output."""
_MOST_CUTS = 12
"""Of one text into parts."""
_LEAST_LETTERS = 5
"""Of a template's own letters, to be looked for in a part of a message: shorter ones would be found by accident."""
_BETWEEN_PARTS = re.compile(r"\n|[;.:,] ")
_LINE = re.compile(r'^(msgid|msgstr) (".*")$', re.MULTILINE)
_VALUE = re.compile(r"\{(\d+)\}(이\(가\)|을\(를\)|은\(는\)|와\(과\)|\(으\)로)?|\{\{|\}\}")
_PARTICLES = {
    "이(가)": ("이", "가"),
    "을(를)": ("을", "를"),
    "은(는)": ("은", "는"),
    "와(과)": ("과", "와"),
    "(으)로": ("으로", "로"),
}
"""After a consonant, and after a vowel."""
_READ_WITH_CONSONANT = "013678"
"""Digits: 영, 일, 삼, 육, 칠, 팔 end with one."""


@dataclass(frozen=True)
class Entry:
    """One message of the catalogue."""

    english: str
    korean: str

    @functools.cached_property
    def literals(self) -> tuple[str, ...]:
        """The template's own text: before, between and after its values."""
        pieces = [""]
        for text, field, _, _ in string.Formatter().parse(self.english):
            pieces[-1] += text
            if field is not None:
                pieces.append("")
        return tuple(pieces)

    @functools.cached_property
    def anchor(self) -> str:
        """Its longest piece; a text without it cannot be this message."""
        return max(self.literals, key=len)

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """What finds the values; those with nothing between them as one."""
        first, *others = map(re.escape, self.literals)
        found = [first]
        for number, literal in enumerate(others, 1):
            together = literal == "" and number < len(others)
            found.append("" if together else f"(.*?){literal}")
        return re.compile("".join(found), re.DOTALL)

    def filled(self, found: re.Match[str]) -> str:
        """The Korean message, with the values that were found; those that are messages are in Korean too."""
        groups, values = list(found.groups()), []
        for number, literal in enumerate(self.literals[1:], 1):
            if literal == "" and number < len(self.literals) - 1:
                value, groups[0] = _halves(groups[0])
            else:
                value = _value(groups.pop(0))
            values.append(value)
        return _filled(self.korean, values)

    @functools.cached_property
    def letters(self) -> int:
        """How much of the message is the template's own."""
        return sum(letter.isalpha() for piece in self.literals for letter in piece)

    @functools.cached_property
    def may_be_accident(self) -> bool:
        """Whether a text of the user's could look like it: not if it has no values, or begins with a space."""
        return len(self.literals) > 1 and not self.english.startswith(" ")


@functools.cache
def entries() -> tuple[Entry, ...]:
    """The whole catalogue; templates with more text of their own first, as they fit by accident less."""
    found = [entry for path in sorted(FOLDER.glob("*.po")) for entry in read(path)]
    return tuple(sorted(found, key=lambda entry: -entry.letters))


def read(path: Path) -> Iterator[Entry]:
    """The messages of one file."""
    texts = [json.loads(quoted) for _, quoted in _LINE.findall(path.read_text(encoding="utf-8"))]
    for english, korean in zip(texts[::2], texts[1::2], strict=True):
        yield Entry(english, korean)


def translated(text: str) -> str:
    """A message in Korean, with its parts as far as they are messages too; else the text as it is."""
    if len(text) > _LONGEST:
        return text
    return _whole(text, least_letters=2) or _in_parts(text) or text


def _whole(text: str, least_letters: int = _LEAST_LETTERS) -> str | None:
    """The message in Korean, if all of the text is one."""
    best: tuple[int, Entry, re.Match[str]] | None = None
    for entry in entries():
        if entry.anchor not in text or (entry.letters < least_letters and entry.may_be_accident):
            continue
        if found := entry.pattern.fullmatch(text):
            # A message in a message is its last value; a template that has one in front was found in the inner message.
            swallowed = sum(len(_BETWEEN_PARTS.findall(value)) for value in found.groups()[:-1])
            if best is None or swallowed < best[0]:
                best = swallowed, entry, found
    return best[1].filled(best[2]) if best else None


def _value(value: str) -> str:
    return _whole(value) or (_in_parts(value) if " " in value.strip() else None) or value


def _halves(text: str) -> tuple[str, str]:
    """Two values with nothing between them: the second is a message, or empty."""
    whole = _value(text)
    if whole == text:
        for at in range(1, len(text)):
            if not text[at].isalnum() and (second := _whole(text[at:])):
                return _value(text[:at]), second
    return whole, ""


def _in_parts(text: str) -> str | None:
    """The message that is only a part of this text: after `job.toml: `, before or after another message."""
    cuts = [found.span() for found in itertools.islice(_BETWEEN_PARTS.finditer(text), _MOST_CUTS)]
    for start, end in cuts:
        if after := _whole(text[end:]):
            return (_whole(text[:start]) or text[:start]) + text[start:end] + after
    for start, end in reversed(cuts):
        if before := _whole(text[:start]):
            return before + text[start:end] + (_in_parts(text[end:]) or text[end:])
    return None


def _filled(korean: str, values: list[str]) -> str:
    def fill(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        value = values[int(found[1])]
        return value + (_particle(found[2], value) if found[2] else "")

    return _VALUE.sub(fill, korean)


def _particle(both: str, value: str) -> str:
    """The particle that fits the value's last sound; both where only a reader knows how it sounds."""
    last = next((letter for letter in reversed(value) if letter.isalnum()), "")
    if "가" <= last <= "힣":
        consonant = (ord(last) - ord("가")) % 28
    elif last and last in string.digits:
        consonant = last in _READ_WITH_CONSONANT
    else:
        return both
    after_l = consonant == 8 or last in ("1", "7", "8")
    if both == "(으)로" and after_l:
        return "로"
    return _PARTICLES[both][0 if consonant else 1]
