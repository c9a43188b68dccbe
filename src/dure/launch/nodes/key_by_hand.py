"""Where the team's key comes from when nodes are started by hand: a file, or a word that the leader prints."""

from __future__ import annotations

import getpass
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.team_key import TeamKey, make_key_file, new_word, read_key_file

KEY_FILE_VARIABLE = "DURE_TEAM_KEY_FILE"
_LOOK_SECONDS = 0.5
_WAYS_OUT = (
    "give all nodes the same --team-key FILE, which only you can read; the leader makes it if it is not there"
)


def key_file(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file that `--team-key` or the environment names; None when neither does."""
    named = given or (Path(environ[KEY_FILE_VARIABLE]) if environ.get(KEY_FILE_VARIABLE) else None)
    return None if named is None else named.absolute()


def wait_for_key_file(path: Path, *, leads: bool, seconds: float, say: Callable[[str], None]) -> None:
    """Until the file is there: the leader makes it, the others wait for that."""
    if leads:
        if not os.path.lexists(path):
            make_key_file(path)
        return
    deadline = time.monotonic() + seconds
    told = False
    while not path.exists():
        if time.monotonic() > deadline:
            raise UsageError(
                f"the team key file {path} is not there after {seconds:.0f} s; the leader makes it where all nodes see "
                "the same folder, else copy it to this node (chmod 600)"
            )
        if not told:
            told = True
            say(f"waits for the team key file {path} (up to {seconds:.0f} s)")
        time.sleep(_LOOK_SECONDS)


def key_by_hand(
    file: Path | None, *, leads: bool, nodes: int, seconds: float, say: Callable[[str], None]
) -> TeamKey:
    """The key of a run whose nodes somebody starts one by one. `seconds` is how long the leader is waited for."""
    if file is not None:
        wait_for_key_file(file, leads=leads, seconds=seconds, say=say)
        return read_key_file(file)
    if nodes == 1:
        return TeamKey.random()  # nobody else is to come
    if leads:
        return _print_word(say)
    return _ask_for_word()


def _print_word(say: Callable[[str], None]) -> TeamKey:
    if not sys.stderr.isatty():
        # What is printed would stay in a log.
        raise UsageError(
            f"the nodes of this run need a key, and there is no terminal to print one on; {_WAYS_OUT}"
        )
    word = new_word()
    say(f"the key of this run is {word}: type it on the other nodes, which ask for it")
    return TeamKey.from_text(word)


def _ask_for_word() -> TeamKey:
    if not sys.stdin.isatty():
        raise UsageError(
            f"the nodes of this run need a key, and there is no terminal to ask for it; {_WAYS_OUT}"
        )
    try:
        typed = getpass.getpass("dure: the key that the leader has printed: ")
    except EOFError:
        typed = ""
    if not typed.strip():
        raise UsageError(f"no key was typed; {_WAYS_OUT}")
    return TeamKey.from_text(typed)
