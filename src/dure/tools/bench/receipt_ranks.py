"""One rank of `dure bench receipt`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from dure.base.run_folder import RunFolder
from dure.data.batches import Batch
from dure.proof.receipt import RECORD
from dure.step.lockstep import StepResult
from dure.team import start
from dure.team.run_receipt import RunReceipt, head_of, state_tensors
from dure.tools.bench.contenders import Transformer, sequences
from dure.tools.bench.workload import Workload


def measure(load: Workload, rounds: int, steps: int, run: str) -> dict[str, Any]:
    """Train two replicas in turn, one of them with a receipt."""
    with start(seed=load.seed, shards=load.shards, threads=1) as team:
        cpu_seconds: dict[str, list[float]] = {"without": [], "with": []}
        replicas = {}
        for kind in cpu_seconds:
            torch.manual_seed(load.seed)
            model = team.replicate(Transformer(load))
            replicas[kind] = model, torch.optim.AdamW(model.parameters(), lr=load.lr, fused=True)
        marked, optimizer = replicas["with"]
        team.mark_gradients(marked)
        receipt = RunReceipt(
            RunFolder(Path(run)),
            head_of({"bench": "receipt"}, load.shards, 0),
            0,
            lambda: state_tensors(marked.module, optimizer, None, sharded=False),
            print,
            left_out=(),
            is_writer=team.is_leader,
            session={"ranks": team.topology.size},
        )
        count = (rounds + 1) * steps
        streams = {
            kind: iter(team.batches(sequences(load), global_batch=load.global_batch, steps=count))
            for kind in replicas
        }

        def step(kind: str) -> tuple[Batch, StepResult]:
            model, updater = replicas[kind]
            batch = next(streams[kind])
            result = team.forward_backward(model, batch, _loss)
            team.update(model, updater)
            return batch, result

        for at in range(rounds + 1):
            for kind, figures in cpu_seconds.items():
                began = time.process_time()
                for _ in range(steps):
                    batch, result = step(kind)
                    if kind == "with":
                        receipt.after_step(batch.step, [result])
                if at:  # the first makes buckets and optimizer state
                    figures.append((time.process_time() - began) / steps)
        began = time.process_time()
        receipt.end(count)
        return {
            "parameters": sum(p.numel() for p in marked.module.parameters()),
            "cpu_seconds": cpu_seconds,
            "root_cpu_seconds": time.process_time() - began,
            "bytes_per_step": RECORD,
        }


def _loss(scores: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, int]:
    total = torch.nn.functional.cross_entropy(scores.flatten(0, 1), answers.flatten(), reduction="sum")
    return total, answers.numel()
