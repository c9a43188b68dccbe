"""Ranks that attach dure's exchange to stock DDP models in stock loops, and compare with plain DDP beside them."""

import contextlib
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dure
from dure.base.errors import DureError
from dure.device.fingerprint import weights_sha256


class Branching(nn.Module):
    """Uses one of two branches, by the batch: parameters that take no part, other ones on other ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x, left=True):
        return (self.left if left else self.right)(torch.tanh(self.first(x)))


class Mixed(nn.Module):
    """Parameters of three dtypes, and buffers that the forward pass writes."""

    def __init__(self):
        super().__init__()
        self.f32, self.f64 = nn.Linear(8, 64), nn.Linear(64, 8, dtype=torch.float64)
        self.bf16, self.norm = nn.Linear(8, 4, dtype=torch.bfloat16), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.bf16(self.norm(self.f64(self.f32(x).double()).float()).bfloat16()).float()


def batch(number, rank, size=8):
    dice = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(6, size, generator=dice), torch.randn(6, 4, generator=dice)


def plain():
    return nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))


CASES = {
    "plain": (plain, {}, {}),
    "views and a static graph": (plain, {"gradient_as_bucket_view": True, "static_graph": True}, {}),
    "small buckets": (plain, {"bucket_cap_mb": 0.1, "gradient_as_bucket_view": True}, {}),
    "accumulation": (plain, {}, {"accumulate": 3}),
    "accumulation in views": (plain, {"gradient_as_bucket_view": True}, {"accumulate": 2}),
    "unused parameters": (Branching, {"find_unused_parameters": True}, {"branches": True}),
    "mixed dtypes": (Mixed, {}, {}),
}


def train(model, steps, *, accumulate=1, branches=False, on_step=None):
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        for part in range(accumulate):
            last = part == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                x, y = batch(step * accumulate + part, rank)
                out = model(x, (step + rank) % 2 == 0) if branches else model(x)
                F.mse_loss(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_step is not None:
            on_step(step, model)
    return model


def furthest(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.double() - b.double()).abs().max().detach()) for a, b in pairs)


def cases(backend="gloo"):
    """By case: hashes of a model that was trained with attach, twice, and how far from plain DDP it ended."""
    dist.init_process_group(backend)
    found = {}
    for name, (make, options, loop) in CASES.items():
        torch.manual_seed(1)
        module = make()
        reference = train(DistributedDataParallel(copy.deepcopy(module), **options), 4, **loop).module
        hashes = []
        for _ in range(2):
            model = DistributedDataParallel(copy.deepcopy(module), **options)
            with dure.attach(model, check_every=2) as attached:
                train(model, 4, **loop)
                assert attached.steps == 4
                attached.check()
                hashes.append(weights_of(model.module))
        found[name] = hashes, furthest(reference, model.module)
        train(model, 2, **loop)  # detached: torch's own all-reduce, and still in step
        found[name][0].append(weights_of(model.module))
    found["two models in one backward pass"] = two_at_once()
    found["refused"] = refusals()
    found["a rank that wrote to its weights"] = divergence()
    dist.destroy_process_group()
    return found


def weights_of(module):
    """Of parameters alone; buffers are each rank's own."""
    holder = nn.ParameterList(module.parameters())
    return weights_sha256(holder)


def two_at_once():
    torch.manual_seed(2)
    models = [DistributedDataParallel(plain()) for _ in range(2)]
    attached = [dure.attach(model, check_every=1) for model in models]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for step in range(4):
        x, y = batch(step, dist.get_rank())
        order = models if dist.get_rank() % 2 else models[::-1]  # no order is promised
        sum(F.mse_loss(model(x), y) for model in order).backward()
        optimizer.step()
        optimizer.zero_grad()
    hashes = [weights_of(model.module) for model in models]
    for each in attached:
        each.detach()
    return hashes


def refusals():
    def told(make):
        try:
            dure.attach(make())
        except DureError as error:
            return str(error)
        return "not refused"

    def hooked():
        model = DistributedDataParallel(plain())
        model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        return model

    one = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found = {
        "no DDP": told(plain),
        "a part of the ranks": told(lambda: DistributedDataParallel(plain(), process_group=one)),
        "sparse": told(lambda: DistributedDataParallel(nn.Embedding(4, 4, sparse=True))),
        "complex": told(lambda: DistributedDataParallel(nn.Linear(2, 2, dtype=torch.complex64))),
        "a hook of its own": told(hooked),
    }
    model = DistributedDataParallel(plain())
    with dure.attach(model):
        try:
            with model.join():
                train(model, 1)
        except Exception as error:
            found["join"] = str(error)
    return found


def divergence():
    """Rank 1 writes to one weight after step 3; replicas are compared every 2 steps."""

    def disturb(step, model):
        if step == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                model.module[2].weight[0, 0] += 1e-3

    model = DistributedDataParallel(plain())
    attached = dure.attach(model, check_every=2)
    try:
        train(model, 9, on_step=disturb)
    except RuntimeError as error:
        return str(error), attached.steps
    finally:
        attached.detach()
    return "not noticed", attached.steps


def script():
    """A stock script that attaches and just ends, in one of three ways."""
    import sys

    dist.init_process_group("gloo")
    model = DistributedDataParallel(plain(), gradient_as_bucket_view=True)
    dure.attach(model)
    train(model, 5)
    if sys.argv[1] == "destroy":
        dist.destroy_process_group()
    elif sys.argv[1] == "raise" and dist.get_rank() == 1:
        raise ValueError("as asked")
    elif sys.argv[1] == "raise":
        train(model, 1)
    print(f"rank {os.environ['RANK']} is done {weights_of(model.module)[:8]}")


if __name__ == "__main__":
    script()
