"""A stock torchrun script: it knows nothing of dure, and writes down all that it can see."""

import json
import multiprocessing
import os
import sys

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

KEPT = []


class Squares:
    """Defined in the script: workers that are spawned must find it in `__main__`."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * index


def main():
    folder, end = sys.argv[1], sys.argv[2]
    rank = os.environ["RANK"]
    method = multiprocessing.get_start_method(allow_none=True)
    noise = numpy.random.rand()
    loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    squares = [batch.tolist() for batch in loader]
    if rank == "0" and end == "raise":
        spawned = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
        squares += [batch.tolist() for batch in spawned]
    dist.init_process_group("gloo")
    noises = [None] * dist.get_world_size()
    dist.all_gather_object(noises, noise)
    main_module = sys.modules["__main__"]
    seen = {
        "env": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "spec": getattr(__spec__, "name", None),
        "loader": type(__loader__).__name__,
        "is_main": main_module.Squares is Squares and main_module.__dict__ is globals(),
        "path": sys.path,
        "cwd": os.getcwd(),
        "threads": torch.get_num_threads(),
        "unbuffered": sys.stdout.write_through,
        "start_method": method,
        "parent": multiprocessing.parent_process() is None,
        "process": multiprocessing.current_process().name,
        "session": os.getsid(0) == os.getpid(),
        "stdin": sys.stdin.read(),
        "squares": squares,
        "noises_differ": len(set(noises)) == len(noises),
    }
    with open(os.path.join(folder, f"{rank}.json"), "w") as file:
        json.dump(seen, file)
    # In turn: torchrun lets its ranks write to one terminal at once, also in the middle of a line.
    for turn in range(len(noises)):
        if rank == str(turn):
            print(f"out {rank}")
            print(f"err {rank}", file=sys.stderr)
        dist.barrier()
    dist.destroy_process_group()
    if end == "raise" and rank == "1":
        raise ValueError("as asked")
    if end == "leave":
        KEPT.append(open(os.path.join(folder, f"{rank}.txt"), "w"))  # noqa: SIM115
        KEPT[0].write("flushed at exit")
        sys.exit(0)


if __name__ == "__main__":
    main()
