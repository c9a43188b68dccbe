"""Ranks on the backend "dure" that make random collectives, and compare with Gloo and with what the numbers say."""

import datetime
import functools
import os
import random
import signal
import sys
import threading
import time

import numpy
import torch
import torch.distributed as dist

from dure.comm.shm_barrier import LINE_BYTES

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALL = (*INTEGERS, *FLOATS, torch.bool, torch.complex64, torch.float8_e4m3fn)
BY_GLOO = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8)
SIZES = (0, 1, 3, 17, 1000, 5000, 40_000, 300_000)
WEIGHTS = (1, 2, 3, 3, 4, 2, 1, 0.3)


def numbers(dtype, shape, dice):
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=dice).bool()
    if dtype.is_complex:
        return torch.randn(shape, generator=dice, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=dice, dtype=torch.float32).to(dtype)
    return torch.randint(0, 120, shape, generator=dice).to(dtype)


def reference(op, parts):
    """From all ranks' numbers, in a wide type; None where torch itself has no such thing."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        stacked = torch.stack(parts).to(torch.int64)
        named = {"SUM": stacked.amax, "MAX": stacked.amax, "PRODUCT": stacked.amin, "MIN": stacked.amin,
                 "BAND": stacked.amin, "BOR": stacked.amax}  # fmt: skip
        return (named[op](0) if op in named else stacked.sum(0) % 2).bool()
    wide = dtype if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([part.to(wide) for part in parts])
    if op == "AVG":
        if dtype.is_floating_point or dtype.is_complex:
            return (stacked.sum(0) / len(parts)).to(dtype)
        return None if dtype.is_signed else (stacked.sum(0).to(dtype).to(wide) // len(parts)).to(dtype)
    if op in ("BAND", "BOR", "BXOR"):
        how = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
        return functools.reduce(how, stacked.unbind()).to(dtype)
    named = {"SUM": stacked.sum, "PRODUCT": stacked.prod, "MIN": stacked.amin, "MAX": stacked.amax}
    return named[op](0).to(dtype)


def is_defined(op, dtype):
    if op in ("BAND", "BOR", "BXOR"):
        return not (dtype.is_floating_point or dtype.is_complex)
    if dtype.is_complex:
        return op in ("SUM", "AVG")
    return not (dtype == torch.bool and op == "AVG")


def close(one, other):
    """Equal for integers, within rounding for floats."""
    if one.dtype.is_floating_point or one.dtype.is_complex:
        rough = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float8_e4m3fn: 0.15}.get(one.dtype, 1e-5)
        wide = torch.complex128 if one.dtype.is_complex else torch.float64
        return torch.allclose(one.to(wide), other.to(wide), rtol=rough, atol=rough)
    return torch.equal(bits(one), bits(other))


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


class Trial:
    """Random collectives on one group of the backend, with a Gloo group of the same ranks beside it."""

    def __init__(self, group, gloo, seed):
        self.group, self.gloo = group, gloo
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.common = random.Random(seed)
        self.own = torch.Generator().manual_seed(seed * 100 + self.rank)
        self.pending = []
        self.wrong = []

    def step(self):
        self.what = ""
        kind = self.common.choice(self.KINDS)
        kind(self)
        if len(self.pending) > 4 or self.common.random() < 0.3:
            self.settle()

    def settle(self):
        self.common.shuffle(self.pending)
        for work, check in self.pending:
            if work is not None:
                work.wait()
            check()
        self.pending = []

    def after(self, work, check, what):
        def told():
            if not check():
                self.wrong.append(what)

        self.pending.append((work, told))

    def shape(self):
        (size,) = self.common.choices(SIZES, WEIGHTS)
        return (size,) if self.common.random() < 0.6 or size % 5 else (5, size // 5)

    def everyones(self, tensor):
        """Gathered by Gloo, as bytes."""
        flat = bits(tensor)
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(parts, flat, group=self.gloo)
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

    def tensor(self, dtype, shape):
        tensor = numbers(dtype, shape, self.own)
        if len(shape) == 2 and self.common.random() < 0.5:
            tensor = tensor.t().contiguous().t()  # not contiguous
        return tensor

    def reduction(self):
        op, dtype = self.common.choice(OPS), self.common.choice(ALL)
        return (op, dtype) if is_defined(op, dtype) else ("SUM", torch.float32)

    def all_reduce(self):
        (op, dtype), shape, is_async = self.reduction(), self.shape(), self.common.random() < 0.5
        tensor = self.tensor(dtype, shape)
        before = tensor.clone()
        again = before.clone() if self.common.random() < 0.3 else None
        expected = reference(op, self.everyones(before)) if tensor.numel() else tensor
        by_gloo = None
        if dtype in BY_GLOO and op != "AVG" and tensor.numel():
            by_gloo = before.contiguous()
            dist.all_reduce(by_gloo, getattr(dist.ReduceOp, op), group=self.gloo)
        work = dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=self.group, async_op=is_async)
        if again is not None:
            dist.all_reduce(again, getattr(dist.ReduceOp, op), group=self.group)

        def check():
            right = expected is None or close(tensor, expected)
            same = again is None or torch.equal(bits(again), bits(tensor))
            return right and same and (by_gloo is None or close(tensor, by_gloo))

        self.after(work, check, f"all_reduce {op} {dtype} {shape}")

    def reduce(self):
        (op, dtype), shape, root = self.reduction(), self.shape(), self.common.randrange(self.size)
        tensor = self.tensor(dtype, shape)
        expected = reference(op, self.everyones(tensor)) if tensor.numel() else tensor
        if self.rank != root:
            expected = tensor.clone()
        work = dist.reduce(
            tensor, group_dst=root, op=getattr(dist.ReduceOp, op), group=self.group, async_op=True
        )
        self.after(work, lambda: expected is None or close(tensor, expected), f"reduce {op} {dtype} {shape}")

    def broadcast(self):
        dtype, shape, root = self.common.choice(ALL), self.shape(), self.common.randrange(self.size)
        tensor = self.tensor(dtype, shape)
        expected = self.everyones(tensor)[root]
        is_async = self.common.random() < 0.5
        work = dist.broadcast(tensor, group_src=root, group=self.group, async_op=is_async)
        self.after(work, lambda: close(tensor, expected), f"broadcast {dtype} {shape}")

    def all_gather(self):
        dtype, shape = self.common.choice(ALL), self.shape()
        tensor = self.tensor(dtype, shape)
        expected = self.everyones(tensor)
        into_one, is_async = self.common.random() < 0.5, self.common.random() < 0.5
        if into_one:
            out = torch.empty((self.size, *shape), dtype=dtype)
            work = dist.all_gather_single(out, tensor.contiguous(), group=self.group, async_op=is_async)
        else:
            out = [torch.empty_like(tensor) for _ in range(self.size)]
            work = dist.all_gather(out, tensor, group=self.group, async_op=is_async)
        self.after(
            work,
            lambda: all(close(one, other) for one, other in zip(out, expected, strict=True)),
            f"all_gather {dtype} {shape}",
        )

    def reduce_scatter(self):
        (op, dtype), shape = self.reduction(), self.shape()
        parts = [self.tensor(dtype, shape) for _ in range(self.size)]
        everyones = [self.everyones(part) for part in parts]
        expected = reference(op, everyones[self.rank]) if parts[0].numel() else parts[0]
        out = torch.empty(shape, dtype=dtype)
        op_of, is_async = getattr(dist.ReduceOp, op), self.common.random() < 0.5
        if self.common.random() < 0.5:
            given = torch.stack(parts)
            work = dist.reduce_scatter_single(out, given, op_of, group=self.group, async_op=is_async)
        else:
            work = dist.reduce_scatter(out, parts, op_of, group=self.group, async_op=is_async)
        self.after(
            work, lambda: expected is None or close(out, expected), f"reduce_scatter {op} {dtype} {shape}"
        )

    def barrier(self):
        dist.barrier(group=self.group)

    def objects(self):
        out = [None] * self.size
        dist.all_gather_object(out, {"rank": self.rank}, group=self.group)
        shared = [f"from {self.rank}"]
        root = self.common.randrange(self.size)
        dist.broadcast_object_list(shared, group_src=root, group=self.group)
        right = [each["rank"] for each in out] == list(range(self.size)) and shared == [f"from {root}"]
        self.after(None, lambda: right, "objects")

    def coalesced(self):
        tensors = [torch.full((n,), float(self.rank)) for n in (1, 1000, 70_000)]
        with dist._coalescing_manager(group=self.group, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.group)
        manager.wait()
        total = float(sum(range(self.size)))
        self.after(None, lambda: all(bool((tensor == total).all()) for tensor in tensors), "coalesced")

    def gloos(self):
        """What is Gloo's own."""
        given = torch.arange(2.0 * self.size) + 100 * self.rank
        out = torch.empty(2 * self.size)
        dist.all_to_all_single(out, given, group=self.group)
        received = torch.empty(3)
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = []
        if self.size > 1:
            works = [dist.isend(torch.full((3,), float(self.rank)), group_dst=to, group=self.group)]
            works.append(dist.irecv(received, group_src=source, group=self.group))
        root = self.common.randrange(self.size)
        parts = [torch.empty(2) for _ in range(self.size)] if self.rank == root else None
        dist.gather(torch.full((2,), float(self.rank)), parts, group_dst=root, group=self.group)
        one = torch.empty(2)
        split = [torch.full((2,), float(r)) for r in range(self.size)] if self.rank == root else None
        dist.scatter(one, split, group_src=root, group=self.group)
        short = torch.empty(2)
        self.group.scatter(short, split or [], root).wait()
        for work in works:
            work.wait()
        right = torch.equal(out.view(-1, 2)[:, 0], torch.arange(self.size) * 100.0 + 2 * self.rank)
        right &= self.size == 1 or bool((received == source).all())
        right &= bool((one == self.rank).all()) and torch.equal(one, short)
        right &= parts is None or [float(p[0]) for p in parts] == list(map(float, range(self.size)))
        self.after(None, lambda: right, "all_to_all, send, recv, gather, scatter")

    KINDS = (all_reduce, all_reduce, all_reduce, reduce, broadcast, all_gather, reduce_scatter, barrier, objects,
             coalesced, gloos)  # fmt: skip


def groups(seed):
    """The world, and random parts of it; each with a Gloo group beside it. None where this rank is not in one."""
    world, dice = dist.get_world_size(), random.Random(seed)
    found = [(dist.group.WORLD, dist.new_group(backend="gloo"))]
    for _ in range(2):
        ranks = sorted(dice.sample(range(world), dice.randint(1, world)))
        pair = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
        found.append(pair if dist.get_rank() in ranks else None)
    return found


def random_sequences(count, seed):
    """What was wrong in `count` random collectives, on several groups in turn; an empty list when all was right."""
    dist.init_process_group("dure", timeout=datetime.timedelta(seconds=120))
    assert dist.get_backend() == "dure"
    assert dist.group.WORLD.shares_memory
    trials = [pair and Trial(*pair, seed + at) for at, pair in enumerate(groups(seed))]
    common = random.Random(seed)
    for _ in range(count):
        trial = trials[common.choice((0, 0, 1, 2))]
        if trial is not None:
            trial.step()
    wrong = []
    for trial in trials:
        if trial is not None:
            trial.settle()
            wrong += trial.wrong
    dist.destroy_process_group()
    assert not [thread for thread in threading.enumerate() if thread.name == "dure-collectives"]
    return wrong


def told_by(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misuse():
    """What ranks are told when they do what cannot be; the group lives on where all ranks were told."""
    dist.init_process_group("dure", timeout=datetime.timedelta(seconds=60))
    rank, found = dist.get_rank(), {}
    found["other sizes"] = told_by(lambda: dist.all_reduce(torch.ones(3 + (rank == 1))))
    found["other calls"] = told_by(
        lambda: dist.all_reduce(torch.ones(4)) if rank == 1 else dist.broadcast(torch.ones(4), 0)
    )
    found["other operators"] = told_by(
        lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN)
    )
    found["bits of floats"] = told_by(lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND))
    found["one tensor too few"] = told_by(lambda: dist.all_gather([torch.ones(4)], torch.ones(4)))
    found["sparse"] = told_by(lambda: dist.all_reduce(torch.eye(3).to_sparse()))  # Gloo's
    dist.barrier()
    found["alive"] = sum_of_ones()
    found["in a forked process"] = in_a_fork()
    found["cpu:dure"] = sum_of_ones(dist.new_group(backend="cpu:dure"))
    # A group in which rank 1 does not come: its wait has a deadline of its own, and a name.
    late = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        found["late"] = told_by(lambda: dist.barrier(late))
        found["after that"] = told_by(lambda: dist.all_reduce(torch.ones(1), group=late))
        found["monitored"] = told_by(lambda: late.monitored_barrier(datetime.timedelta(seconds=1)))
    dist.barrier()
    found["as a future"] = as_a_future()
    dist.destroy_process_group()
    found["destroyed"] = told_by(lambda: dist.all_reduce(torch.ones(1)))
    return found


def sum_of_ones(group=None):
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def as_a_future():
    tensor = torch.ones(5)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    return future.wait().tolist()


def in_a_fork():
    """As a worker of a DataLoader: it may not use the group, and its end must not disturb it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, told_by(sum_of_ones).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        told = file.read()
    os.waitpid(child, 0)
    return told, sum_of_ones()


def lose_a_rank():
    """Rank 1 is killed while the others reduce; they are told at once, with its number."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others at once
    dist.init_process_group("dure")
    sum_of_ones()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    told = told_by(sum_of_ones)
    print(f"TOLD {told} after {time.monotonic() - began:.0f} s", flush=True)


def leave(how):
    """A script's ends: with the group destroyed or not, with work that nobody waited for."""
    dist.init_process_group("dure")
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(3)]
    works[0].wait()
    if how == "destroy":
        dist.destroy_process_group()
    elif how == "alone" and dist.get_rank() == 0:
        works.append(dist.all_reduce(torch.ones(3), async_op=True))  # nobody else comes to it
    print(f"rank {os.environ['RANK']} is done", flush=True)


def wrap_around():
    """Barriers beyond what 32 bits count."""
    dist.init_process_group("dure")
    channel = dist.group.WORLD._channel
    dist.barrier()
    start = (1 << 31) - 7 + channel._channel.came % 2
    dist.barrier()
    channel._counters.values[dist.get_rank(), 0] = start
    if (
        dist.get_rank() == 0
    ):  # what the ranks have in common: how often they arrived, and the barrier that is over
        ranks = dist.get_world_size()
        common = numpy.frombuffer(channel._shared.bytes, numpy.uint32, 2, LINE_BYTES * ranks)
        common[:] = start * ranks % (1 << 32), start
    channel._channel.came = start
    time.sleep(0.3)
    found = [sum_of_ones() for _ in range(30)]
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    {"lose": lose_a_rank}.get(sys.argv[1], lambda: leave(sys.argv[1]))()
