"""A rank whose machine flips one bit of a gradient in some backward passes, before gradients meet."""

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dure
from dure.base.errors import ComputedWrongly
from dure.data.seeds import seed_of
from dure.device.fingerprint import weights_sha256
from dure.step.shadow import chosen

SEED, SHARDS, STEPS = 11, 6, 1000
JOB = """
[model]
factory = "corrupting.py:model"
args = {{ folder = "{{storage}}/checkpoints", flips = {flips} }}
[data]
factory = "corrupting.py:data"
global_batch = 24
[train]
steps = 24
seed = 11
lr = 1e-2
audit = {audit}
on_corruption = "{how}"
[team]
ranks = 3
shards = 6
[checkpoint]
memory_every = 1
"""


@dataclass
class Flips:
    """Flips a bit in some shards, on the process that makes it. Which shard a backward pass is of, the seed of torch's
    generator tells: it is another one for each step and shard, and no other pass (the start-up probe's) has it."""

    module: nn.Module
    wanted: object
    """(step, shard) -> whether to flip there."""
    lowest_bit: int = 0
    highest_bit: int = 31
    again: bool = False
    """Whether a machine is always wrong: it flips the same bit each time that it computes the shard."""
    done: list = field(default_factory=list)
    """(step, shard, parameter) of each."""

    def __post_init__(self):
        self._shards = {seed_of(SEED, "shard", t, 0, s): (t, s) for t in range(STEPS) for s in range(SHARDS)}
        self._seen = set()
        names = [name for name, _ in self.module.named_parameters()]
        for name, parameter in self.module.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self._look(gradient, name, names))

    def _look(self, gradient, name, names):
        where = self._shards.get(torch.initial_seed())
        if where is None or not self.wanted(*where):
            return gradient
        dice = random.Random(f"{where}")
        if name != dice.choice(names) or (where in self._seen and not self.again):
            return gradient
        self._seen.add(where)
        flipped = gradient.clone()
        at, bit = dice.randrange(gradient.numel()), dice.randint(self.lowest_bit, self.highest_bit)
        value = flipped.view(-1)[at : at + 1].view(torch.int32)
        value.bitwise_xor_(torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32))
        self.done.append((*where, name))
        return flipped


def net():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 5))


def data(n=600):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 16, generator=generator)
    return TensorDataset(x, (x @ torch.randn(16, 5, generator=generator)).argmax(1))


def audited(step, shard, ranks, share):
    """Whether a shard is computed again."""
    asked = chosen(SEED, share, step, 0, SHARDS, ranks, SHARDS)
    return asked is not None and asked.shard == shard


def trained(steps, audit=0.0, flips_on=-1, wanted=None, how="repeat", **flipping):
    """In a rank: train, and tell what was flipped here, what was found, and what came of it."""
    with dure.start(seed=SEED, shards=SHARDS, audit=audit, on_corruption=how) as team:
        module = net()
        model = team.replicate(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        flips = Flips(module, wanted, **flipping) if team.rank == flips_on else None
        computed, found, error, taken = 0, [], "", 0
        try:
            for batch in team.batches(data(), global_batch=24, steps=steps):
                result = team.forward_backward(model, batch, F.cross_entropy)
                team.update(model, optimizer)
                taken = batch.step + 1
                if result.audited is not None:
                    computed += 1
                    wrong = result.audited.corruption
                    if wrong is not None:
                        found.append(
                            (batch.step, wrong.chosen.shard, wrong.tensor, wrong.rank, wrong.in_step)
                        )
        except ComputedWrongly as wrong:
            error = str(wrong)
            team.discard(model)
        flipped = flips.done if flips is not None else []
        return {
            "sha": weights_sha256(module),
            "flipped": flipped,
            "found": found,
            "computed": computed,
            "error": error,
            "taken": taken,
        }


def undisturbed_and_repaired(steps, ranks):
    """Without audit; with every step audited and every bit flipped that is looked at; and with none flipped."""
    share = 0.6
    return {
        "undisturbed": trained(steps),
        "repaired": trained(steps, share, ranks - 1, lambda t, s: t and audited(t, s, ranks, share)),
        "half": trained(steps, 0.5),
        "all": trained(steps, 1.0),
        "stopped": trained(steps, 1.0, ranks - 1, lambda t, s: t == 5 and audited(t, s, ranks, 1.0), "stop"),
        "as far": trained(6),
        "broken": trained(steps, share, 0, lambda t, s: t and audited(t, s, ranks, share), again=True),
    }


def at_a_rate(steps, share, rate):
    """Rank 1 of 3 flips a bit of a shard's gradients with this rate; no exponent's, so that training goes on."""

    def wanted(step, shard):
        return random.Random(f"{step} {shard} flip").random() < rate

    return trained(steps, share, 1, wanted, highest_bit=22)


def model(folder="", flips=-1):
    """For a job: one bit, once, on one rank, in the first shard after step 3 that is computed again, while `flip` is in
    the folder."""
    module = net()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    def wanted(step, shard):
        if step <= 3 or not audited(step, shard, ranks, 1.0):
            return False
        try:
            Path(folder, "flip").rename(Path(folder, "flipped"))
        except FileNotFoundError:
            return False
        return True

    if int(os.environ.get("RANK", "0")) == flips:
        Flips(module, _once(wanted))
    return module


def put_job(folder, how, audit=1.0, flips=1):
    """Write a job whose rank `flips` is wrong once; returns its path."""
    shutil.copy(__file__, folder)
    path = folder / "job.toml"
    path.write_text(JOB.format(how=how, audit=audit, flips=flips))
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "flip").touch()
    return path


def _once(wanted):
    """All parameters of one pass are asked after the same one."""
    answers = {}

    def asked(step, shard):
        if (step, shard) not in answers:
            answers[step, shard] = wanted(step, shard)
        return answers[step, shard]

    return asked
