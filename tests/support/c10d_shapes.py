"""What torch's test_c10d_common asks of every backend, asked of ours in one launch of 4 ranks.

That file is not in torch's wheel, and starts new processes for each of its tests; these are the same questions.
"""

import copy
import datetime
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from support.backend_ranks import told_by


def sequence_numbers(group, ranks, beside):
    """After each collective, and where some ranks have called one less."""

    def everyones():
        own = group._get_sequence_number_for_group()
        numbers = [None] * dist.get_world_size(beside)
        dist.all_gather_object(numbers, own, group=beside)
        return numbers

    if dist.get_rank() not in ranks:
        return None
    found = [everyones()]
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
        found.append(everyones())
    dist.all_gather_object([None] * len(ranks), 1, group=group)
    found.append(everyones())
    work = None
    if dist.get_rank(group) not in (0, 2):
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    found.append(everyones())
    if work is None:
        dist.all_reduce(torch.ones(1), group=group)
    else:
        work.wait()
    return found


def outsiders():
    """A group without this rank: a warning, and nothing else."""
    group = dist.new_group([0, 2])
    told = []
    for name, call in {
        "all_gather": lambda: dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.zeros(2), group=group),
        "all_reduce": lambda: dist.all_reduce(torch.zeros(2), group=group),
        "barrier": lambda: dist.barrier(group=group),
        "broadcast": lambda: dist.broadcast(torch.zeros(2), src=0, group=group),
    }.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        if any(name in str(each.message) and "does not belong to" in str(each.message) for each in caught):
            told.append(name)
    return told


def membership():
    group = dist.new_group([1])
    return (
        dist.get_group_rank(group, 1),
        dist.get_global_rank(group, 0),
        dist.get_process_group_ranks(group),
        told_by(lambda: dist.get_group_rank(group, 0)),
        told_by(lambda: dist.get_global_rank(group, 1)),
    )


def other_dtypes():
    """What is refused before anybody waits."""
    ranks = dist.get_world_size()
    one = torch.ones(2, 2)
    half = one.half()
    ones = [torch.zeros(2, 2) for _ in range(ranks)]
    mixed = [ones[0], half, *ones[2:]]
    calls = [
        lambda: dist.all_gather(mixed, one),
        lambda: dist.all_gather(ones, half),
        lambda: dist.all_gather_coalesced([mixed], ones),
        lambda: dist.all_reduce_coalesced(mixed),
        lambda: dist.reduce_scatter(one, mixed),
        lambda: dist.reduce_scatter(half, ones),
        lambda: dist.all_to_all_single(half, one),
        lambda: dist.all_to_all(mixed, ones),
        lambda: dist.scatter(one, mixed),
        lambda: dist.gather(half, ones),
    ]
    return [told_by(call) for call in calls]


def complex_and_bool():
    real = torch.arange(2.0) + dist.get_rank()
    given = torch.view_as_complex(real)
    out = [torch.empty((), dtype=torch.complex64) for _ in range(dist.get_world_size())]
    dist.all_gather(out, given)
    flags = torch.tensor([True, False, False, True]) if dist.get_rank() == 0 else torch.zeros(4).bool()
    dist.broadcast(flags, src=0)
    return [complex(each) for each in out], flags.tolist()


def made_by_their_own_ranks():
    """Groups that only their ranks know of; twice the same ones; and one in another order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [each for each in range(size) if each % 2 != rank % 2]
    outside = dist.new_group(others, use_local_synchronization=True)
    found = [outside is None or outside is dist.GroupMember.NON_GROUP_MEMBER]  # torch's two ways to say so
    own = [rank // 2 * 2, rank // 2 * 2 + 1]
    for group in [dist.new_group(own, use_local_synchronization=True) for _ in range(2)]:
        out = [torch.tensor([-1, -1]) for _ in own]
        dist.all_gather(out, torch.tensor([rank // 2, rank]), group=group)
        found.append(torch.stack(out).tolist() == [[rank // 2, each] for each in own])
        found.append(dist.get_process_group_ranks(group) == own and dist.get_backend(group) == "dure")
    return found


class Twice(nn.Module):
    """A layer that is computed again in the backward pass, and used twice."""

    def __init__(self, times, use_reentrant, *, share):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        if share:
            self.first.weight = self.second.weight
        self._times, self._reentrant = times, use_reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(self._times):
            x = checkpoint(self.second, x, use_reentrant=self._reentrant)
        return x


def checkpointed_layers():
    """How far DDP's gradients are from those of one process with all samples, for each set-up."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    for times, reentrant, share, static in (
        (1, True, False, False),
        (1, False, True, False),
        (2, False, False, False),
        (2, False, True, True),
        (2, True, True, True),
    ):
        torch.manual_seed(1)
        model = Twice(times, reentrant, share=share)
        samples, targets = torch.randn(4 * size, 20), torch.randn(4 * size, 20)
        replica = DistributedDataParallel(
            copy.deepcopy(model), gradient_as_bucket_view=times == 1, static_graph=static
        )
        off = 0.0
        for _ in range(2):
            for module, at in ((model, slice(None)), (replica, slice(4 * rank, 4 * rank + 4))):
                module.zero_grad()
                F.mse_loss(module(samples[at].requires_grad_()), targets[at]).backward()
            pairs = zip(model.parameters(), replica.module.parameters(), strict=True)
            off = max(off, *(float((one.grad - other.grad).abs().max()) for one, other in pairs))
        found[f"{times} {reentrant} {share} {static}"] = off
    return found


def own_hooks():
    """A hook that makes its own future, torch's own all-reduce and fp16 hooks, and one that is refused."""
    found = {}
    for name, hook in {
        "own": lambda state, bucket: ready(torch.full_like(bucket.buffer(), 2.0)),
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
    }.items():
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
        model.register_comm_hook(None, hook)
        model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
        found[name] = model.module.weight.grad.flatten().tolist()
    refused = DistributedDataParallel(nn.Linear(3, 1))
    found["refused"] = told_by(lambda: refused.register_comm_hook(None, 1))
    return found


def ready(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def shapes():
    """Entry point of a rank."""
    dist.init_process_group("dure", timeout=datetime.timedelta(seconds=120))
    # First: torch names these groups by how many others a rank knows, which must be as many on all their ranks.
    by_own_ranks = made_by_their_own_ranks()
    everyone, some = list(range(dist.get_world_size())), [0, 1, 2]
    part, beside_part = dist.new_group(some), dist.new_group(some, backend="gloo")
    found = {
        "made by their own ranks": by_own_ranks,
        "numbers": sequence_numbers(dist.group.WORLD, everyone, dist.new_group(backend="gloo")),
        "numbers of a part": sequence_numbers(part, some, beside_part),
        "outsiders": outsiders(),
        "membership": membership(),
        "other dtypes": other_dtypes(),
        "complex and bool": complex_and_bool(),
        "checkpointed layers": checkpointed_layers(),
        "own hooks": own_hooks(),
        "names": [dist.get_backend(), dist.group.WORLD.name(), dist.group.WORLD._get_backend_name()],
    }
    dist.barrier()
    dist.destroy_process_group()
    return found
