"""Words for the three readers of a batch script: sbatch, the shell, and the file names that Slurm fills in."""

from __future__ import annotations

import re
import shlex

from dure.base.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z0-9._/:=,@%+-]+")
_VARIABLE = re.compile("\0([a-z_]+)\0")


def variable(name: str) -> str:
    """A piece of a word that the script's shell fills in: the value of its variable `name`.

    Marked with a character that no path and no argument can have, so that no text is ever taken for one.
    """
    return f"\0{name}\0"


def shell_word(text: str) -> str:
    """`text` as one word of the shell, whatever is in it; only `variable`s are filled in."""
    pieces = _VARIABLE.split(text)
    if any("\0" in piece for piece in pieces):
        raise UsageError(f"{text!r} has a zero byte, which no argument of a command can have")
    words = [f'"${piece}"' if at % 2 else shlex.quote(piece) for at, piece in enumerate(pieces) if piece]
    return "".join(words) or "''"


def sbatch_word(what: str, value: str) -> str:
    """`value` for an #SBATCH line.

    sbatch reads quotes and backslashes as a shell does, fills in no variable, takes an unquoted # for the start of a
    comment, and ends the value where the line ends, quoted or not.
    """
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise UsageError(
            f"{what} is {value!r}, with a line break or another control character, which an #SBATCH line cannot "
            "have; use one without"
        )
    if _PLAIN.fullmatch(value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def file_pattern(what: str, path: str) -> str:
    """`path` as a part of a file name in which Slurm fills in %j and the like."""
    if "\\" in path:
        # In a file name, Slurm takes it for a request to fill in nothing, and drops it.
        raise UsageError(
            f"{what} is {path!r}, with a backslash, which Slurm drops from the names of its log files; give a "
            "--run-dir without one"
        )
    return path.replace("%", "%%")
