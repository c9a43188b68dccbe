"""The team key: a secret by which the processes of one run recognise each other.

It travels over ssh's standard input, in a file that only its owner can read, or as a word that a person types. It is
never an argument or a variable, and never in logs, events or messages: connections prove that they have it
(`dure.comm.handshake`), and ranks get only what is derived from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.files import sync_folder

_SECRET_BYTES = 32
_LEAST_CHARACTERS = 12
_MOST_BYTES = 4096
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Letters that nobody takes for one another."""
_WORD = re.compile(r"[0-9a-z]{4}-?[0-9a-z]{4}-?[0-9a-z]{4}")
_LOOK_ALIKE = str.maketrans("oil", "011")


@dataclass(frozen=True)
class TeamKey:
    """The secret itself; `repr` does not show it."""

    secret: bytes = field(repr=False)

    @classmethod
    def random(cls) -> TeamKey:
        """A new one, for processes that it is handed to by a machine."""
        return cls(secrets.token_bytes(_SECRET_BYTES))

    @classmethod
    def from_text(cls, text: str) -> TeamKey:
        """The key that a word or the content of a file stands for.

        It is made expensive to guess (scrypt: 16 MiB and some 50 ms a try), as a word has 60 bits only.
        """
        return cls(
            hashlib.scrypt(_canonical(text).encode(), salt=b"dure team key 1", n=1 << 14, r=8, p=1, dklen=32)
        )

    @classmethod
    def from_hex(cls, text: str) -> TeamKey:
        """The inverse of `hex`."""
        if not re.fullmatch(rf"[0-9a-f]{{{2 * _SECRET_BYTES}}}", text):
            raise UsageError("what came in the place of the team's key is none")
        return cls(bytes.fromhex(text))

    def hex(self) -> str:
        """For a pipe to a process that shall have it."""
        return self.secret.hex()

    def derived(self, label: str) -> bytes:
        """A secret for one purpose, from which neither the key nor that of another purpose can be found."""
        return hmac.digest(self.secret, b"dure derived key 1\0" + label.encode(), "sha256")


def new_word() -> str:
    """A key to be typed, such as `7h2k-m4qd-x90t`."""
    outgoing = "".join(secrets.choice(_ALPHABET) for _ in range(12))
    return "-".join(outgoing[at : at + 4] for at in range(0, 12, 4))


def _canonical(text: str) -> str:
    """What was typed, as it was meant: a word's letters without regard to case, dashes and look-alikes."""
    text = text.strip()
    if _WORD.fullmatch(text.lower()):
        return text.lower().translate(_LOOK_ALIKE).replace("-", "")
    return text


def read_key_file(path: Path) -> TeamKey:
    """The key in a file, which must be this user's, and readable by nobody else."""
    try:
        # A FIFO must not keep us waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise UsageError(
            f"the team key file {path} cannot be read: {error.strerror}; it is a file that all nodes have alike"
        ) from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise UsageError(f"the team key file {path} is no regular file; give one")
        if about.st_uid != os.geteuid():
            raise UsageError(
                f"the team key file {path} belongs to user {about.st_uid}, and this is user {os.geteuid()}; give one "
                "of your own"
            )
        if about.st_mode & 0o077:
            raise UsageError(
                f"the team key file {path} can be opened by others (mode {stat.S_IMODE(about.st_mode):04o}); "
                f"chmod 600 {path}, and make a new key if somebody may have read it"
            )
        content = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    text = content.decode(errors="replace").strip()
    if len(content) > _MOST_BYTES or len(text) < _LEAST_CHARACTERS:
        raise UsageError(
            f"the team key file {path} has {len(text)} characters; a key has {_LEAST_CHARACTERS} to {_MOST_BYTES}: "
            "remove it, and the leader makes a good one"
        )
    return TeamKey.from_text(text)


def make_key_file(path: Path) -> None:
    """Write a new key to a file that is not there yet, for this user alone. Whole, or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"cannot make the team key file {path}: {error.strerror}; give another place"
        ) from None
    try:
        try:
            os.fchmod(descriptor, 0o600)
            os.write(descriptor, secrets.token_hex(_SECRET_BYTES).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise UsageError(
            f"cannot write the team key file {path}: {error.strerror}; give another place"
        ) from None
