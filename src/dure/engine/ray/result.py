"""Train a job on Ray from a driver of your own."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure.base.errors import DureError, UsageError
from dure.base.say import printable
from dure.config import load_job, parse_settings
from dure.engine.node_start import NodeStart


def refuse_without_ray() -> None:
    """Raise UsageError where the extra is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("the engine ray needs ray; install it with: pip install 'dure[ray]'")


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    path: Path
    """The run's folder: logs, events, checkpoints, summary.json."""
    weights_sha256: str
    """Of all weights; the same on any number of nodes and ranks."""
    metrics: dict[str, Any]
    """The loss, and the metrics of the last evaluation."""
    summary: dict[str, Any]
    """All that `dure train --json` prints."""


def fit(
    job: str | Path,
    *,
    ray_address: str | None = None,
    nodes: int | str | None = None,
    ranks: int | str | None = None,
    run_dir: str | Path | None = None,
    settings: Sequence[str] = (),
) -> Result:
    """Train a job on Ray's nodes, and return what came of it.

    `nodes`, `ranks` and `settings` are what `--nodes`, `--ranks` and `--set` are; `nodes="1:4"` takes what Ray has.
    Raises `DureError` with the run's first cause; `Resumable` when it was stopped, and the same call with `run_dir`
    goes on. Ray is used as this process is connected with it; otherwise a connection is made, and closed at the end.
    """
    refuse_without_ray()
    from dure.engine.ray.machines import train_on_ray

    path = Path(job)
    given = parse_settings(settings)
    if ray_address is not None:
        given["ray.address"] = json.dumps(ray_address)
    loaded = load_job(
        path,
        given,
        None if ranks is None else str(ranks),
        None if nodes is None else str(nodes),
    )
    printed: list[str] = []
    start = NodeStart(loaded, path, None if run_dir is None else Path(run_dir), as_json=True)
    run = train_on_ray(start, printed.append)
    return result_from(run, "\n".join(printed))


def result_from(run: Path, printed: str) -> Result:
    """What the leader printed, as a value."""
    try:
        summary = json.loads(printed)
        metrics = {"loss": summary["loss"], **summary["metrics"]}
        return Result(run, summary["weights_sha256"], metrics, summary)
    except (ValueError, KeyError, TypeError):
        raise DureError(
            f"the leader's summary is not what this version of dure prints: {printable(printed, 200)}; it is in "
            f"{run}/summary.json"
        ) from None
