"""A stock script: DDP on CPUs, a trainer that holds the model, an end as most scripts have it."""

import os
import sys

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group, new_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Noise(Dataset):
    def __init__(self, size):
        self.samples = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Trainer:
    def __init__(self, group=None):
        data = Noise(128)
        self.loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
        self.model = DistributedDataParallel(torch.nn.Linear(20, 1), process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(inputs), targets).backward()
                self.optimizer.step()


def part():
    """A group for a while, which is gone before the model is."""
    group = new_group()
    trainer = Trainer(group)
    trainer.train(2)
    destroy_process_group(group)


def main(end, parts):
    init_process_group("gloo")
    for _ in range(parts):
        part()
    print(f"threads {len(os.listdir('/proc/self/task'))}")
    trainer = Trainer()
    trainer.train(3)
    if end == "destroy":
        destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    print(f"rank {os.environ['RANK']} is done")
