"""Train a cat classifier on any number of ranks, with a plain loop of your own. The same file runs

    dure run --ranks 4 ddp.py --epochs 2
    torchrun --nproc_per_node=4 ddp.py --epochs 2
    srun --ntasks=4 python ddp.py --epochs 2
    python ddp.py                                                            (one rank)
    python ddp.py --rank 0 --world-size 4 --master 127.0.0.1:29500           (in four terminals: 0, 1, 2, 3)

and the weights at the end are the same bits in every case.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

import dure
from dure.tools.demo.cats import model, photos

HERE = Path(__file__).parent
STORAGE = HERE if (HERE / "training_data").exists() else HERE.parent / "shared"


def main() -> None:
    """The whole script: start, replicate, batches, go on, step, save, done."""
    parser = argparse.ArgumentParser(parents=[dure.arguments()])
    parser.add_argument("--epochs", type=int, default=1, help="passes over the photos")
    parser.add_argument(
        "--data", default=str(STORAGE / "training_data" / "train"), help="where the photos are"
    )
    parser.add_argument("--save", metavar="DIR", help="save there, and go on from what is saved there")
    args = parser.parse_args()

    with dure.start(args, seed=42) as team:
        replica = team.replicate(model())
        optimizer = torch.optim.AdamW(replica.parameters(), lr=2e-3, fused=True)
        batches = team.batches(photos(args.data, augment=True), global_batch=40, epochs=args.epochs)
        saved = args.save and team.checkpoint(model=replica, optimizer=optimizer, every=5, folder=args.save)
        if saved:
            saved.resume()
        for batch in batches:
            loss = team.step(replica, optimizer, batch, F.cross_entropy)
            if batch.last_of_epoch and team.is_leader:
                print(f"epoch {batch.epoch}: loss {loss:.4f}", flush=True)
            if saved:
                saved.save_if_due()
        fingerprint = team.prove(replica, optimizer)
        print(f"rank {team.rank} of {team.topology.size}: {fingerprint}", flush=True)


if __name__ == "__main__":
    main()
