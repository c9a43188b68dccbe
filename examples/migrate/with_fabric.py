"""Lightning Fabric: fabric run --accelerator=cpu --strategy=ddp --devices=4 with_fabric.py"""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from task import dataset, model
from torch.utils.data import DataLoader

EPOCHS, GLOBAL_BATCH = 5, 40


def main():
    fabric = Fabric()  # accelerator, strategy and devices come from the command
    fabric.seed_everything(42)
    replica = model()
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    replica, optimizer = fabric.setup(replica, optimizer)
    loader = DataLoader(dataset(), batch_size=GLOBAL_BATCH // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)

    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for points, spirals in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(replica(points), spirals)
            fabric.backward(loss)
            fabric.clip_gradients(replica, optimizer, max_norm=1.0)
            optimizer.step()
        fabric.print(f"epoch {epoch}: loss {loss.item():.4f}")
        fabric.save("snapshot.ckpt", {"model": replica, "optimizer": optimizer, "epoch": epoch})


if __name__ == "__main__":
    main()
