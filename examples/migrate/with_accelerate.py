"""Accelerate: torchrun --nproc_per_node=4 with_accelerate.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from task import dataset, model
from torch.utils.data import DataLoader

EPOCHS, GLOBAL_BATCH = 5, 40


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    replica = model()
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    loader = DataLoader(dataset(), batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
    replica, optimizer, loader = accelerator.prepare(replica, optimizer, loader)

    for epoch in range(EPOCHS):
        for points, spirals in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(replica(points), spirals)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(replica.parameters(), 1.0)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
        accelerator.save_state("snapshot")
    accelerator.end_training()


if __name__ == "__main__":
    main()
