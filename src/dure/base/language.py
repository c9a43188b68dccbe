"""The two languages that users see. English is the source, and what logs, events and files hold."""

from __future__ import annotations

import os
from typing import Literal, get_args

from dure.base.errors import UsageError

Language = Literal["en", "ko"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

_spoken: Language | None = None


def chosen_language(wanted: str | None) -> Language:
    """What the user asked for with --lang, else DURE_LANG, else what the locale says, else English."""
    if wanted is None and _spoken is not None:
        return _spoken
    for given, source in ((wanted, "--lang "), (os.environ.get("DURE_LANG") or None, "DURE_LANG=")):
        if given is not None:
            for language in LANGUAGES:
                if given == language:
                    return language
            raise UsageError(f"{source}{given}: dure speaks {' and '.join(LANGUAGES)}")
    locale = os.environ.get("LC_ALL") or os.environ.get("LC_MESSAGES") or os.environ.get("LANG") or ""
    return "ko" if locale.startswith("ko") else "en"


def speak(language: Language) -> None:
    """From now on, this process tells its user everything in this language; called by commands, never by ranks."""
    global _spoken  # noqa: PLW0603
    _spoken = language


def as_spoken(text: str, language: Language | None = None) -> str:
    """A message in the given language, or that of `speak`; what the catalogue does not know stays English."""
    if (language or _spoken) != "ko":
        return text
    from dure.base.catalogue import translated  # takes 30 ms, which English does not need to spend

    return translated(text)
