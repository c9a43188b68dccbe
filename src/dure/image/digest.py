"""An image's digest: computed, recorded beside it, and held against it before anything runs from it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.files import open_plain, read_at_most, write_whole

_SQUASHFS = b"hsqs"
_SIF = b"SIF_MAGIC"
"""At byte 32 of what `apptainer build` makes."""
_LONGEST_RECORD = 64 << 10


def digest_of(image: Path) -> str:
    """The sha256 of the image's bytes."""
    try:
        with open(open_plain(image), "rb") as file:
            first = file.read(64)
            if not first.startswith(_SQUASHFS) and not first[32:].startswith(_SIF):
                raise UsageError(
                    f"{image} is not a squashfs image; `dure image build -o {image.name}` makes one"
                )
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(
            f"cannot read the image {image}: {error.strerror}; `dure image build` makes one"
        ) from None


def record_of(image: Path) -> Path:
    """The file beside an image that says its digest, in the form that `sha256sum --check` reads."""
    return image.parent / f"{image.name}.sha256"


def record(image: Path, digest: str) -> None:
    """Write the digest beside the image."""
    write_whole(record_of(image), f"{digest}  {image.name}\n")


def recorded(image: Path) -> str | None:
    """The digest that was recorded, or None where none was."""
    try:
        text = read_at_most(record_of(image), _LONGEST_RECORD).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in its path, or no text
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read {record_of(image)}: {reason}") from None
    found = re.match(r"([0-9a-f]{64})\b", text)
    if found is None:
        raise UsageError(
            f"{record_of(image)} does not begin with a sha256; write it anew with `dure image digest --record`"
        )
    return found[1]


def verified(image: Path) -> str:
    """The image's digest, after holding it against the recorded one where there is one."""
    known, now = recorded(image), digest_of(image)
    if known is not None and known != now:
        raise UsageError(
            f"the image {image} is damaged or another one: its sha256 is {now[:16]}…, but {record_of(image).name} says "
            f"{known[:16]}…; copy or build it again (or `dure image digest --record` if the change is meant)"
        )
    return now
