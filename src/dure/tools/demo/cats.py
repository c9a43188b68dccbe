"""What the cats job names: the model and the photos."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from dure.base.errors import JobError

LABELS = ("other", "cat")
"""The model's outputs, in order."""


def model() -> nn.Module:
    """A network of 27,170 weights for 64×64 photos, with one output a label."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        *_stage(16, 24),
        *_stage(24, 32),
        *_stage(32, 48),
        # Where an ear is says much about whose it is, so the last map is read whole, not averaged.
        nn.Flatten(),
        nn.Linear(48 * 4 * 4, len(LABELS)),
    )


def _stage(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    # GroupNorm looks at one photo at a time: in shards of five, BatchNorm's averages would be mostly chance.
    return (
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Photos(Dataset[tuple[Tensor, int]]):
    """The photos that a folder's `labels.csv` lists, decoded when asked for (so loader workers have work)."""

    def __init__(self, folder: Path, augment: bool) -> None:
        listing = folder / "labels.csv"
        try:
            with listing.open(newline="") as file:
                rows = [(folder / row["file"], LABELS.index(row["label"])) for row in csv.DictReader(file)]
        except FileNotFoundError as error:
            raise JobError(f"{listing} does not exist; `dure demo` draws the photos.") from error
        except (KeyError, ValueError) as error:
            raise JobError(f"{listing} needs the columns file and label, label one of {LABELS}.") from error
        self._rows = rows
        self._augment = augment

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._rows[index]
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
        photo = torch.from_numpy(pixels).permute(2, 0, 1).float().div_(127.5).sub_(1)
        return (_vary(photo) if self._augment else photo), label


def _vary(photo: Tensor) -> Tensor:
    """Flipped or not, moved a little, brighter or darker. Torch's own dice: the trainer seeds them for every
    (seed, epoch, sample), so a photo varies the same way whichever process decodes it."""
    if torch.rand(()) < 0.5:
        photo = photo.flip(2)
    down, right = torch.randint(-4, 5, (2,)).tolist()
    photo = photo.roll((down, right), (1, 2))
    return photo * torch.empty(()).uniform_(0.85, 1.15) + torch.empty(()).uniform_(-0.1, 0.1)


def photos(folder: str, augment: bool = False) -> Photos:
    """The data set of a folder that `draw_photos` drew."""
    return Photos(Path(folder), augment)
