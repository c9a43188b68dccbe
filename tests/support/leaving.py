"""A team's script whose model outlives the process group, while an exchange of one's own is still under way."""

import argparse
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import dure


def main(argv=()):
    args = argparse.ArgumentParser(parents=[dure.arguments()]).parse_args(argv)
    samples = [(torch.full((8,), float(n)), torch.tensor(n % 2)) for n in range(8)]
    with dure.start(args, seed=1) as team:
        model = team.replicate(torch.nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in team.batches(samples, global_batch=8, epochs=1):
            team.step(model, optimizer, batch, F.cross_entropy)
        time.sleep(2 * team.rank)
        # Rank 0 leaves while this waits for rank 1. Gloo's thread has the last reference to the tensor, and drops it.
        dist.all_reduce(torch.ones(3), async_op=True)
        print(f"rank {team.rank} is done", flush=True)
    return team.rank


if __name__ == "__main__":
    main(sys.argv[1:])
