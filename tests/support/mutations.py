"""Mistakes that are made with devices, one at a time: applied in every rank, by patches of the rooms' own names.

`mutated` is an entry point like `on_devices.cases`. Each mistake says by which case it shows.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist

import dure.team  # noqa: F401  (with all rooms that seed)
from dure.checkpoint import state
from dure.comm import group
from dure.comm.reduce import hook, over_backend
from dure.device import copying, pinned, streams
from support import on_devices, standin

BEFORE_THE_FORK = "STANDIN_USED_BEFORE_THE_FORK"
if os.environ.get(BEFORE_THE_FORK):  # this module is imported before the ranks are forked
    standin.use()
    torch.ones(1, device=standin.KIND)
    torch.accelerator.synchronize()


def no_wait_for_the_bucket():
    after = streams.SideStream.after
    streams.SideStream.after = lambda self, *ready, device: after(self, device=device)


def nothing_made_current_in_the_thread():
    @contextlib.contextmanager
    def after(self, *ready, device):
        for moment in ready:
            if moment is not None:
                moment.synchronize()
        yield

    streams.SideStream.after = after


def a_future_without_devices():
    hook.future_on = lambda device: torch.futures.Future()


def seeded(seed_all):
    """Every room has the name for itself."""
    for name, room in list(sys.modules.items()):
        if name.startswith("dure.") and hasattr(room, "seed_all"):
            room.seed_all = seed_all


def seeds_for_the_host_alone():
    seeded(torch.default_generator.manual_seed)


def seeds_for_another_device():
    native = standin.use()

    def seed_all(seed):
        torch.default_generator.manual_seed(seed)
        native.seed(native.device_count() - 1, seed)

    seeded(seed_all)


def pinned_memory_read_without_a_wait():
    def empty(memory, full):
        for place, start, count in full[1] if full is not None else ():
            memory[place : place + count].copy_(full[0][start : start + count])

    pinned.DeviceReader._empty = staticmethod(empty)


def a_capture_that_does_not_wait_for_the_step():
    copying.ready_now = lambda device: None


def a_hash_that_does_not_wait_for_the_step():
    state.ready_now = lambda device: None


def device_tensors_for_the_hosts_collectives():
    group.backends_for = lambda device: "gloo"


def host_tensors_for_the_devices_collectives():
    group.backends_for = lambda device: "standin_ccl"


def collectives_that_nobody_waits_for():
    for name in ("all_to_all_single", "all_gather_single"):
        call = getattr(dist, name)

        def at_once(*args, call=call, **options):
            kept.append(call(*args, async_op=True, **options))

        setattr(dist, name, at_once)


kept = []
"""Works, so that they are not waited for by being forgotten."""


def flags_that_nobody_reads():
    over_backend.OverGloo.conclude = lambda self: 2


MUTATIONS = {
    no_wait_for_the_bucket: "transformer",
    nothing_made_current_in_the_thread: "transformer",
    a_future_without_devices: "halves",
    seeds_for_the_host_alone: "transformer",
    seeds_for_another_device: "transformer",
    pinned_memory_read_without_a_wait: "captured",
    a_capture_that_does_not_wait_for_the_step: "captured",
    a_hash_that_does_not_wait_for_the_step: "captured",
    device_tensors_for_the_hosts_collectives: "exchanges",
    host_tensors_for_the_devices_collectives: "transformer",
    collectives_that_nobody_waits_for: "exchanges,sharded",
    flags_that_nobody_reads: "exchanges",
}
"""Each mistake, and the cases that show it."""


def mutated(name, folder):
    """Entry point: the cases of a mutation, with it; "" is none, and all their cases."""
    standin.use()
    for mutation in MUTATIONS:
        if mutation.__name__ == name:
            mutation()
    names = MUTATIONS_BY_NAME.get(name, EVERY_CASE)
    return on_devices.cases(standin.KIND, folder, tuple(names.split(",")))


PAUSES_US = {"a_future_without_devices": 100_000}
"""The longest pauses of streams, where the mistake shows only if one is much later than the other."""
MUTATIONS_BY_NAME = {mutation.__name__: names for mutation, names in MUTATIONS.items()}
EVERY_CASE = "exchanges,transformer,halves,captured,sharded"
