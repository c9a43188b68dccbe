"""The jobs of chapters 8 to 11, as TOML; `dure train` runs them like any other."""

from __future__ import annotations

import json
from pathlib import Path

_TRAIN = """
name = "lesson-{name}"
storage = {storage}

[model]
factory = "dure.tools.lesson.parts:wide"
args = {{ width = {width} }}
{weights}
[data]
factory = "dure.tools.lesson.parts:drawn"
args = {{ samples = 2048, seed = 1, pace = {pace} }}
global_batch = {batch}

[train]
loss = "cross_entropy"
optimizer = "SGD"
lr = 0.05
steps = {steps}
seed = 42

[checkpoint]
{checkpoint}
[team]
ranks = 4
{cluster}"""


def write_job(
    folder: Path,
    name: str,
    *,
    width: int = 512,
    steps: int = 60,
    batch: int = 256,
    pace: float = 0.0,
    weights: str | None = None,
    load: str = "slices",
    save: bool = False,
    hosts: tuple[str, ...] = (),
) -> Path:
    """Write one job below `folder`, which is its storage too; returns the file."""
    given = f"weights = {json.dumps(weights)}\nload = {json.dumps(load)}\n" if weights is not None else ""
    cluster = f"\n[cluster]\nnodes = {len(hosts)}\nhosts = {json.dumps(list(hosts))}\n" if hosts else ""
    text = _TRAIN.format(
        name=name,
        storage=json.dumps(str(folder)),
        width=width,
        weights=given,
        pace=pace,
        batch=batch,
        steps=steps,
        checkpoint="every_steps = 50\nmemory_every = 5\n" if save else "",
        cluster=cluster,
    )
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path
