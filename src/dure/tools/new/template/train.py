"""The same training as job.toml, with a loop of your own: `dure run --ranks 2 train.py`.

torchrun, srun and plain `python train.py` start it too, with the same weights at the end.
"""

import argparse

import torch
import torch.nn.functional as F
from parts import model, spirals

import dure


def main() -> None:
    """Start, replicate, train, measure, prove."""
    parser = argparse.ArgumentParser(parents=[dure.arguments()])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data")
    args = parser.parse_args()

    with dure.start(args, seed=42) as team:
        replica = team.replicate(model())
        optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        for batch in team.batches(spirals(600, seed=1), global_batch=40, epochs=args.epochs):
            loss = team.step(replica, optimizer, batch, F.cross_entropy, clip_norm=1.0)
            if batch.last_of_epoch and team.is_leader and batch.epoch % 5 == 4:
                print(f"epoch {batch.epoch + 1}: loss {loss:.4f}", flush=True)
        found = team.evaluate(
            replica,
            spirals(150, seed=2),
            {"accuracy": lambda scores, of: (scores.argmax(1) == of).float()},
            batch=40,
        )
        fingerprint = team.prove(replica, optimizer)  # compares all replicas, bit for bit
        if team.is_leader:
            print(
                f"held out: accuracy {found.metrics['accuracy']:.1%}; weights {fingerprint} on every rank",
                flush=True,
            )


if __name__ == "__main__":
    main()
