"""The two languages that users see."""

from __future__ import annotations

import os
from typing import Literal, get_args

from dure.base.errors import UsageError

Language = Literal["en", "ko"]
LANGUAGES: tuple[Language, ...] = get_args(Language)


def chosen_language(wanted: str | None) -> Language:
    """What the user asked for, else what the locale says, else English."""
    if wanted is not None and wanted not in LANGUAGES:
        raise UsageError(f"--lang {wanted}: dure speaks {' and '.join(LANGUAGES)}")
    locale = os.environ.get("LC_ALL") or os.environ.get("LC_MESSAGES") or os.environ.get("LANG") or ""
    return "ko" if (wanted or locale).startswith("ko") else "en"
