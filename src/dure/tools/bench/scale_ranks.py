"""The ranks of `dure bench scale`: a small model trained for some steps, with the bytes that each phase sends."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from dure.device.fingerprint import named_weights
from dure.step.loss import as_sum
from dure.team import Team, start
from dure.tools.lab.network import sent_bytes

WIDTH, CLASSES, SAMPLES, BATCH = 512, 16, 256, 64
SHARDS = 16
STEPS = 4


@dataclass(frozen=True)
class Counted:
    """What one rank found."""

    weights_sha256: str
    parameters: int
    sent: dict[str, int]
    """Bytes that this rank's node has sent, by phase; empty where there is no link to count on."""


def train(counts: bool) -> Counted:
    """Entry point: start a team, copy a replica, train, prove; the bits of it, and what went over this node's link."""
    sent: dict[str, int] = {}
    before = sent_bytes() if counts else 0

    def mark(phase: str, team: Team) -> None:
        nonlocal before
        if counts:
            dist.barrier()  # nobody sends for this phase any more
            now = sent_bytes()
            sent[phase], before = now - before, now
            team.barrier()
            before = sent_bytes()

    with start(seed=7, shards=SHARDS) as team:
        mark("start", team)
        module = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        )
        replica = team.replicate(module)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
        mark("replicate", team)
        dice = torch.Generator().manual_seed(3)
        data = TensorDataset(
            torch.randn(SAMPLES, WIDTH, generator=dice), torch.randint(CLASSES, (SAMPLES,), generator=dice)
        )
        loss = as_sum(nn.functional.cross_entropy)
        for number, batch in enumerate(team.batches(data, global_batch=BATCH, steps=STEPS + 1)):
            team.step(replica, optimizer, batch, loss)
            mark("first step" if number == 0 else f"step {number}", team)
        team.prove(replica, optimizer)
        mark("proof", team)
        digest = hashlib.sha256()
        for _, tensor in named_weights(replica.module):
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        parameters = sum(parameter.numel() for parameter in replica.parameters())
        return Counted(digest.hexdigest(), parameters, sent)
