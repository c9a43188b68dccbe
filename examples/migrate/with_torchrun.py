"""Stock PyTorch: torchrun --nproc_per_node=4 with_torchrun.py"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import dataset, model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, GLOBAL_BATCH = 5, 40


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    replica = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    data = dataset()
    sampler = DistributedSampler(data, seed=42)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler)

    first = 0
    if os.path.exists("snapshot.pt"):
        snapshot = torch.load("snapshot.pt", weights_only=True)
        replica.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first = snapshot["epoch"] + 1

    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for points, spirals in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(replica(points), spirals)
            loss.backward()
            optimizer.step()
        if rank == 0:
            state = {
                "model": replica.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, "snapshot.pt")
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
