"""What ranks do in the tests. torch is imported only where it is needed, so that most start at once."""

import atexit
import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

from dure.base.errors import JobError, ReplicasDiffer
from dure.observe.heartbeat import Heartbeat, Phase

RANK = "RANK"


def rank() -> int:
    return int(os.environ[RANK])


def square(number):
    import torch

    print(f"rank {rank()} squares {number}")
    print("to stderr", file=sys.stderr)
    return rank(), number * number, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.getcwd()


def in_order_of_a_set():
    return list({f"word {number}" for number in range(50)}), os.environ["PYTHONHASHSEED"]


def big():
    return bytes([rank()]) * (3 << 20)


def all_reduce():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def raise_while_others_wait(failing):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    dist.barrier()
    if rank() == failing:
        # As in real code: the peers see the connection close before this rank's own exception is out.
        try:
            raise ValueError("the cause")
        finally:
            dist.destroy_process_group()
            time.sleep(0.3)
    dist.all_reduce(torch.ones(1000))


def exit_with(code, hard):
    if rank() == 1:
        (os._exit if hard else sys.exit)(code)
    return "fine"


def raise_ours(kind):
    if rank() == 1:
        raise {"job": JobError("data.n is 0; use 1."), "differ": ReplicasDiffer("ranks 0 and 1 differ")}[kind]
    time.sleep(60)


def crash():
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def unpicklable():
    return threading.Lock()


def linger(seconds):
    """Return, but leave behind what keeps a process from ending."""
    atexit.register(time.sleep, seconds if rank() else 0)
    return rank()


def leave_with_work_under_way():
    from support.leaving import main

    return main()


def wait(folder, options):
    if options.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.get("child") and os.fork() == 0:
        note(folder, f"child-{rank()}")
        time.sleep(600)
    note(folder, f"rank-{rank()}")
    time.sleep(600)


def step_until_stopped(folder, run):
    """Train in name only: the last rank computes for ever in step 3, the others wait for it."""
    heartbeat = Heartbeat(run.heartbeat(rank()))
    for step in range(3):
        for phase in (Phase.DATA, Phase.COMPUTE, Phase.EXCHANGE):
            heartbeat.beat(step, phase)
            time.sleep(0.01)
    last = rank() == int(os.environ["WORLD_SIZE"]) - 1
    heartbeat.beat(3, Phase.COMPUTE if last else Phase.EXCHANGE)
    note(folder, f"rank-{rank()}")
    wait_here()


def wait_here():
    time.sleep(600)


def beat_slowly(run, seconds):
    heartbeat = Heartbeat(run.heartbeat(rank()))
    end = time.monotonic() + seconds
    step = 0
    while time.monotonic() < end:
        heartbeat.beat(step, Phase.COMPUTE)
        step += 1
        time.sleep(0.2)
    return step


def note(folder, name):
    path = Path(folder) / f".{name}"
    path.write_text(str(os.getpid()))
    path.rename(Path(folder) / name)


def fail_until(folder, run, restarts, how):
    """Get one step further each time; the last rank fails in its own way until there were enough restarts."""
    import torch
    import torch.distributed as dist

    again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    heartbeat = Heartbeat(run.heartbeat(rank()))
    heartbeat.beat(again if how != "kill without progress" else 0, Phase.COMPUTE)
    print(f"rank {rank()}, restart {again}")
    # Before the barrier: whoever fails after it ends the others at once.
    note(folder, f"rank-{rank()}-{again}")
    dist.barrier()
    if again < restarts and rank() == int(os.environ["WORLD_SIZE"]) - 1:
        if how == "raise":
            raise ValueError("a bug")
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    total = torch.tensor([float(rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item(), again


def gather_texts(texts):
    """What every rank has, gathered; the last ones are what a stranger might send."""
    from dure.comm.group import Group, join_world
    from dure.comm.topology import read_topology

    topology = read_topology(os.environ)
    join_world(topology, 60.0)
    group = Group(None, topology.rank, topology.size)
    return [group.gather(own[topology.rank], "a test") for own in texts]
