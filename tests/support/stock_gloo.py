"""A stock script that says gloo, or nothing, and asks for what torch gives to groups of that name alone."""

import datetime
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group(*sys.argv[1:])
    if sys.argv[1:]:  # torch takes it from no group of another name
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    half = dist.new_group([0], backend="gloo")
    if dist.get_rank() == 0:
        dist.barrier(half)
    print(f"{type(dist.group.WORLD).__name__} is called {dist.get_backend()}")
    dist.destroy_process_group()
