"""Which rank took which sample of an epoch: as recorded, and as both splits deal them out."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dure.base.files import open_plain, read_at_most
from dure.data.shards import Split, SplitKind, rank_of_shard

MOST = 20_000
"""Samples that are drawn; of a larger set, the first."""
_PHOTOS = "dure.tools.demo.cats:photos"
_THUMB = 32
_ACROSS = 20
_MOST_THUMBS = 1000
_LONGEST_PHOTO = 1 << 20
NOBODY = -1


def recorded(by_rank: Mapping[int, Mapping[int, Sequence[Sequence[int]]]], samples: int) -> dict[str, Any]:
    """The last epoch that is recorded from its start: per sample its rank, and how often it came."""
    epochs = sorted({epoch for of_rank in by_rank.values() for epoch in of_rank})
    count = min(samples, MOST)
    found: dict[str, Any] = {"epoch": None, "owner": [], "times": [], "step": []}
    whole = [epoch for epoch in epochs if sum(_seen(of, epoch) for of in by_rank.values()) >= samples]
    if not epochs:
        return found
    epoch = whole[-1] if whole else epochs[-1]
    owner, times, steps = [NOBODY] * count, [0] * count, [NOBODY] * count
    for rank, of_rank in by_rank.items():
        for step, ids in enumerate(of_rank.get(epoch, ())):
            for sample in ids:
                if sample < count:
                    owner[sample], steps[sample] = rank, step
                    times[sample] += 1
    return {"epoch": epoch, "owner": owner, "times": times, "step": steps}


def _seen(of_rank: Mapping[int, Sequence[Sequence[int]]], epoch: int) -> int:
    return sum(len(ids) for ids in of_rank.get(epoch, ()))


def dealt(samples: int, job: Mapping[str, Any], shards: int, ranks: int) -> dict[str, Any]:
    """Both splits: the rank of each position in an epoch's order, and its step."""
    data = job.get("data")
    data = data if isinstance(data, dict) else {}
    batch = data.get("global_batch")
    if type(batch) is not int or not 0 < batch < 1 << 31 or not 0 < ranks <= shards <= 1 << 12 or samples < 1:
        return {}
    return {
        kind: _positions(Split(samples, batch, shards, kind, data.get("drop_last") is True), ranks)
        for kind in _KINDS
    }


_KINDS: tuple[SplitKind, ...] = ("interleaved", "blocks")


def _positions(split: Split, ranks: int) -> dict[str, list[int]]:
    count = min(split.samples, MOST)
    owner, steps = [NOBODY] * count, [NOBODY] * count
    of_shard = [rank_of_shard(shard, ranks, split.shards) for shard in range(split.shards)]
    # Blocks begin far apart: of a large set, steps are looked at until enough are found, or all of the first ones.
    for step in range(min(split.steps, MOST)):
        for shard in range(split.active(step)):
            positions = split.positions(step, shard)
            for position in positions[: max(0, count)]:
                if position < count:
                    owner[position], steps[position] = of_shard[shard], step
    return {"owner": owner, "step": steps}


def thumbnails(job: Mapping[str, Any]) -> bytes | None:
    """The demo's photos, side by side in one JPEG of 32 by 32 pixels each, 20 across; None for other data."""
    data = job.get("data")
    if not isinstance(data, dict) or data.get("factory") != _PHOTOS:
        return None
    arguments, storage = data.get("args"), job.get("storage")
    folder = arguments.get("folder") if isinstance(arguments, dict) else None
    if not isinstance(folder, str) or not isinstance(storage, str) or "\0" in folder + storage:
        return None
    place = Path(folder.replace("{storage}", storage))
    try:
        listing = read_at_most(place / "labels.csv", 1 << 20).decode()
        names = [row["file"] for row in csv.DictReader(io.StringIO(listing))][:_MOST_THUMBS]
        return _sprite(place, names) if names else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sprite(place: Path, names: Sequence[str]) -> bytes:
    from PIL import Image

    rows = -(-len(names) // _ACROSS)
    sprite = Image.new("RGB", (_ACROSS * _THUMB, rows * _THUMB))
    for at, name in enumerate(names):
        path = place / Path(name).name  # of this folder alone, whatever the listing says
        if path.is_symlink():
            raise ValueError("a link")
        with open(open_plain(path), "rb") as file:
            content = file.read(_LONGEST_PHOTO)
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
            if max(image.size) > 1024:
                raise ValueError("no photo of the demo")
            small = image.convert("RGB").resize((_THUMB, _THUMB))
        sprite.paste(small, (at % _ACROSS * _THUMB, at // _ACROSS * _THUMB))
    out = io.BytesIO()
    sprite.save(out, "JPEG", quality=85)
    return out.getvalue()
