"""A stock script with several silent mistakes, which goes on from what it saved; `right` has none of them.

dure run --ranks 2 careless.py FOLDER [right]
"""

import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FOLDER, RIGHT = Path(sys.argv[1]), sys.argv[2:] == ["right"]
EPOCHS, STOPS = 2, 12


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    data = TensorDataset(torch.randn(80, 8), torch.randint(4, (80,)))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4)))
    if RIGHT:
        torch.manual_seed(42 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    path, begun, done = FOLDER / "state.pt", 0, 0
    resumes = path.exists()
    dist.barrier()
    if resumes:
        state = torch.load(path, weights_only=True)
        model.module.load_state_dict(state["model"])
        begun, done = state["epoch"], state["batches"] if RIGHT else 0
    step = 0
    for epoch in range(begun, EPOCHS):
        if RIGHT:
            sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(itertools.islice(loader, done, None), done):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if step == STOPS and not resumes:
                state = {"model": model.module.state_dict(), "epoch": epoch, "batches": number + 1}
                if rank == 0 or not RIGHT:
                    torch.save(state, path if rank == 0 else path.with_suffix(".other"))
                    torch.save(state, FOLDER / "latest.pt")
                break
        done = 0
    dist.barrier()
    print(f"rank {rank} is done")
    dist.destroy_process_group()


main()
