"""One rank of `dure bench receipt`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dure.base.run_folder import RunFolder
from dure.comm.reduce.gradient_marks import Windows
from dure.data.batches import Batch
from dure.proof.receipt import RECORD
from dure.step.lockstep import StepResult
from dure.team import Team, start
from dure.team.run_receipt import RunReceipt, head_of, state_tensors
from dure.tools.bench.contenders import Transformer, sequences
from dure.tools.bench.paired import cpu_seconds_of, in_turn
from dure.tools.bench.workload import Workload

_REPEATS = 200


def measure(load: Workload, rounds: int, steps: int, run: str) -> dict[str, Any]:
    """Train two replicas in turn, one of them with a receipt; then do what a receipt takes alone."""
    with start(seed=load.seed, shards=load.shards, threads=1) as team:
        count = (rounds + 1) * steps
        marked, optimizer = replica_of(team, load)
        plain = replica_of(team, load)
        team.mark_gradients(marked)

        def open_receipt(name: str) -> RunReceipt:
            return RunReceipt(
                RunFolder(Path(run) / name),
                head_of({"bench": "receipt"}, load.shards, 0),
                0,
                lambda: state_tensors(marked.module, optimizer, None, sharded=False),
                print,
                left_out=(),
                is_writer=team.is_leader,
                session={"ranks": team.topology.size},
            )

        receipt = open_receipt("run")
        last: list[tuple[Batch, StepResult]] = []

        def with_receipt(step: Callable[[], tuple[Batch, StepResult]]) -> None:
            last[:] = [step()]
            receipt.after_step(last[0][0].step, [last[0][1]])

        marking = partial(step_of, team, load, marked, optimizer, count)()
        figures = in_turn(
            {"without": partial(step_of, team, load, *plain, count)(), "with": lambda: with_receipt(marking)},
            rounds,
            steps,
        )
        began = time.process_time()
        receipt.end(count)
        root = time.process_time() - began
        counted = _counted(team, load, marked.module, *last[0], open_receipt("counted"))
        return {
            "parameters": sum(p.numel() for p in marked.module.parameters()),
            "figures": figures,
            "root_cpu_seconds": root,
            "counted": counted,
            "bytes_per_step": RECORD,
        }


def replica_of(team: Team, load: Workload) -> tuple[Any, torch.optim.Optimizer]:
    """A replica of the bench's transformer, and its optimizer."""
    torch.manual_seed(load.seed)
    model = team.replicate(Transformer(load))
    return model, torch.optim.AdamW(model.parameters(), lr=load.lr, fused=True)


def step_of(
    team: Team, load: Workload, model: Any, optimizer: torch.optim.Optimizer, count: int
) -> Callable[[], tuple[Batch, StepResult]]:
    """A function that takes the next of `count` steps."""
    batches = iter(team.batches(sequences(load), global_batch=load.global_batch, steps=count))

    def step() -> tuple[Batch, StepResult]:
        batch = next(batches)
        result = team.forward_backward(model, batch, _loss)
        team.update(model, optimizer)
        return batch, result

    return step


def _counted(
    team: Team, load: Workload, module: torch.nn.Module, batch: Batch, result: StepResult, receipt: RunReceipt
) -> dict[str, float]:
    """CPU-seconds on this rank of all that a receipt adds to a step: the same calls, with nothing in between."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    gradients = {id(p): p.grad for p in parameters}
    windows = Windows(parameters)
    exchanger = team.exchanger()
    numbers = result.totals.as_vector().numel()
    marks = result.marks
    assert marks is not None

    def fingerprints(step: int) -> None:
        found = windows.marks(step, load.shards, batch.content_mark)
        for shard in batch.shards:
            seen = [parameters[at] for at in found.wants(parameters)]
            found.note(shard.shard, seen, [gradients[id(p)] for p in seen])
        found.take(found.as_vector(numbers))

    def exchange(_: int) -> None:
        exchanger.total(torch.zeros(numbers, dtype=torch.float64))

    try:
        return {
            "fingerprints": cpu_seconds_of(fingerprints, _REPEATS),
            "exchange": cpu_seconds_of(exchange, _REPEATS),
            "record": cpu_seconds_of(lambda step: receipt.after_step(step, [result]), _REPEATS),
        }
    finally:
        exchanger.close()


def _loss(scores: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, int]:
    total = torch.nn.functional.cross_entropy(scores.flatten(0, 1), answers.flatten(), reduction="sum")
    return total, answers.numel()
