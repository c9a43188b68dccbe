"""What ranks of different nodes prove to each other: their agents hand it to them through memory without a name.

Only the way to it is in the environment, so that nothing that prints or inherits variables has the secret. Ranks that
no agent of `dure` started have none: their connections are as trustworthy as torch's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from dure.comm.topology import LINK_SECRET_VARIABLE

_MOST_BYTES = 64


@contextlib.contextmanager
def offered(secret: bytes) -> Iterator[dict[str, str]]:
    """Within `with`, processes of this user that have the variables can read the secret."""
    descriptor = os.memfd_create("dure-link-secret", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, secret)
        yield {LINK_SECRET_VARIABLE: f"{os.getpid()}:{descriptor}"}
    finally:
        os.close(descriptor)


def read_link_secret(environ: Mapping[str, str]) -> bytes:
    """The secret that this rank was offered; nothing where there is none."""
    process, _, descriptor = environ.get(LINK_SECRET_VARIABLE, "").partition(":")
    if not process.isdecimal() or not descriptor.isdecimal():
        return b""
    try:
        with open(f"/proc/{process}/fd/{descriptor}", "rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""
