"""One rank of `dure bench audit`."""

from __future__ import annotations

from typing import Any

from dure.team import start
from dure.tools.bench.paired import in_turn
from dure.tools.bench.receipt_ranks import replica_of, step_of
from dure.tools.bench.workload import Workload


def measure(load: Workload, rounds: int, steps: int) -> dict[str, Any]:
    """Train two replicas in turn, one of them with a shadow shard in every step."""
    with (
        start(seed=load.seed, shards=load.shards, threads=1) as plain,
        start(seed=load.seed, shards=load.shards, threads=1, audit=1.0) as audited,
    ):
        kinds = {"without": plain, "with": audited}
        models = {kind: replica_of(team, load) for kind, team in kinds.items()}
        count = (rounds + 1) * steps
        taken = {kind: step_of(team, load, *models[kind], count) for kind, team in kinds.items()}
        seen = 0

        def with_audit() -> None:
            nonlocal seen
            _, result = taken["with"]()
            seen += result.audited is not None and result.audited.chosen.by == audited.rank

        figures = in_turn({"without": taken["without"], "with": with_audit}, rounds, steps)
        parameters = sum(p.numel() for p in models["with"][0].parameters())
        return {"parameters": parameters, "figures": figures, "audited": seen}
