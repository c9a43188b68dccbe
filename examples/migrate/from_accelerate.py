"""The same with dure: dure run --ranks 4 from_accelerate.py"""

import torch
import torch.nn.functional as F
from task import dataset, model

import dure

EPOCHS, GLOBAL_BATCH = 5, 40


def main():
    with dure.start(seed=42) as team:
        replica = team.replicate(model())
        optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        checkpoint = team.checkpoint(model=replica, optimizer=optimizer, every=26)
        checkpoint.resume()

        for batch in team.batches(dataset(), global_batch=GLOBAL_BATCH, epochs=EPOCHS):
            loss = team.step(replica, optimizer, batch, F.cross_entropy, clip_norm=1.0)
            if batch.last_of_epoch and team.is_leader:
                print(f"epoch {batch.epoch}: loss {loss:.4f}", flush=True)
            checkpoint.save_if_due()


if __name__ == "__main__":
    main()
