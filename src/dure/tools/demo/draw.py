"""The demo's photos, as files: drawn once, the same bytes for the same seed, found again by the next run.

training_data/
  train/      400 photos, half of them cats      labels.csv: file, label, kind
  heldout/    100 more that training never sees  drawn.json: what was drawn, with which dice
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from dure.base.errors import UsageError
from dure.base.files import write_whole

VERSION = 1
"""Raised whenever the same seed would draw other pictures, so that old folders are drawn anew."""

_OTHERS = ("dog", "rabbit", "dog", "rabbit", "thing")
"""What the photos of no cat show, in turn: mostly animals, because they are the hard ones."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Drawn:
    """What a folder holds, as its `drawn.json` says. The same value means the same bytes."""

    seed: int
    count: int
    version: int = VERSION

    @classmethod
    def read(cls, folder: Path) -> Drawn | None:
        """The folder's own record, or None when it has none."""
        path = folder / "drawn.json"
        try:
            return cls(**{name: int(value) for name, value in json.loads(path.read_text()).items()})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} is not a record of drawn photos ({error}); remove the folder."
            ) from error

    def differences(self, other: Drawn) -> str:
        """In words: what `other` has instead."""
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(
            f"{name} {mine[name]} → {theirs[name]}" for name in mine if mine[name] != theirs[name]
        )


@dataclass(frozen=True)
class Photo:
    """One photo to be: its place in the data set decides its name, its label and its picture."""

    index: int

    @property
    def label(self) -> str:
        """Cats and others take turns, so that any block of photos holds both."""
        return "cat" if self.index % 2 == 0 else "other"

    @property
    def kind(self) -> str:
        """What the picture shows."""
        return "cat" if self.label == "cat" else _OTHERS[self.index // 2 % len(_OTHERS)]

    @property
    def file(self) -> str:
        """The file's name: cat-000.png, other-000.png, cat-001.png…"""
        return f"{self.label}-{self.index // 2:03d}.png"

    def png(self, seed: int) -> bytes:
        """The picture; the same bytes for the same seed and index, however many photos there are."""
        from dure.tools.demo.pictures import paint

        content = io.BytesIO()
        paint(self.kind, Random(f"{VERSION}/{seed}/{self.index}")).save(content, "PNG")
        return content.getvalue()


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


def draw_photos(folder: Path, count: int = 400, seed: int = 0, say: Say = _to_stderr) -> list[Path]:
    """Make `folder` hold `count` photos, half of them cats, and a `labels.csv`; returns the photos' paths.

    A folder that has them all is left as it is. One that was drawn with other arguments is drawn anew, and
    one with missing photos is completed; `say` is told which. Other files in it are never touched.
    """
    if count < 2 or count % 2:
        raise UsageError(
            f"{count} photos cannot be half cats, half others; ask for an even number from 2 up."
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; the photos need a folder of that name, or choose another.")
    wanted, found = Drawn(seed, count), Drawn.read(folder)
    photos = [Photo(index) for index in range(count)]
    paths = [folder / photo.file for photo in photos]

    if found is None:
        theirs = next((path for path in (*paths, folder / "labels.csv") if path.exists()), None)
        if theirs is not None:
            raise UsageError(f"{theirs} is in the way, and was not drawn here; choose another folder.")
        folder.mkdir(parents=True, exist_ok=True)
    elif found != wanted:
        say(f"{folder}: drawing again ({found.differences(wanted)})")
        _remove_drawn(folder)

    missing = [photo for photo in photos if not (folder / photo.file).exists()]
    if found == wanted and not missing and (folder / "labels.csv").exists():
        return paths
    if found == wanted:
        say(f"{folder}: drawing {len(missing)} missing of {count} photos")
    elif found is None:
        say(f"{folder}: drawing {count} photos")

    # The record comes first and the old photos are gone by now: whenever this is interrupted, every photo
    # that stands here belongs to the record, and the next call draws only the rest.
    write_whole(folder / "drawn.json", json.dumps(asdict(wanted)) + "\n")
    for photo in missing:
        write_whole(folder / photo.file, photo.png(seed))
    write_whole(folder / "labels.csv", _labels(photos))
    return paths


def draw_training_data(
    folder: Path, count: int = 400, heldout: int = 100, seed: int = 0, say: Say = _to_stderr
) -> tuple[list[Path], list[Path]]:
    """Draw `folder/train` and `folder/heldout`; no photo of one is drawn with dice of the other."""
    return (
        draw_photos(folder / "train", count, 2 * seed, say),
        draw_photos(folder / "heldout", heldout, 2 * seed + 1, say),
    )


def _labels(photos: list[Photo]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("file", "label", "kind"))
    rows.writerows((photo.file, photo.label, photo.kind) for photo in photos)
    return text.getvalue()


def _remove_drawn(folder: Path) -> None:
    (folder / "labels.csv").unlink(missing_ok=True)
    for path in folder.iterdir():
        if re.fullmatch(r"(cat|other)-\d{3,}\.png", path.name):
            path.unlink()
