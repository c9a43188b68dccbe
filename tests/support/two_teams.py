"""Two teams, one after the other, in the same ranks: as a script that tries two seeds does."""

import argparse
import gc
import os

import torch
import torch.nn.functional as F
from torch import nn

import dure


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 2


def train(args, seed):
    with dure.start(args, seed=seed) as team:
        model = team.replicate(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for batch in team.batches(Numbers(), global_batch=16, epochs=2):
            team.step(model, optimizer, batch, F.cross_entropy)
        return f"rank {team.rank} of {team.topology.size}, seed {seed}: {team.prove(model, optimizer)}"


if __name__ == "__main__":
    args = argparse.ArgumentParser(parents=[dure.arguments()]).parse_args()
    for seed in (1, 2, 1):
        print(train(args, seed), flush=True)
        gc.collect()
        print(f"descriptors: {len(os.listdir('/proc/self/fd'))}", flush=True)
