"""A script of somebody's own: two models, an average of one, values of its own; it saves, and goes on from what it has
saved. What it comes to is in the file that it is given."""

import argparse
import json
import os
import signal
import time

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import dure
from dure.device.fingerprint import weights_sha256


class Points(Dataset):
    """Points, each drawn from its number; a part of them is noise that is drawn when they are read."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        point = torch.randn(6, generator=generator)
        return point + 0.1 * torch.rand(6), int(point[0] > 0)


class Net(torch.nn.Sequential):
    """With all that a state needs: buffers, dropout."""

    def __init__(self, out):
        super().__init__(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(16, out),
        )


class Seen:
    """An object with a state of its own, tensors in it too."""

    def __init__(self):
        self.ids, self.losses = torch.zeros(48, dtype=torch.long), []

    def state_dict(self):
        return {"ids": self.ids, "losses": self.losses}

    def load_state_dict(self, state):
        self.ids, self.losses = state["ids"], state["losses"]


def main():
    parser = argparse.ArgumentParser(parents=[dure.arguments()])
    parser.add_argument("out")
    parser.add_argument("--folder")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--memory-every", type=int, help="steps between two states in memory")
    parser.add_argument("--nap", type=float, default=0.0, help="seconds that a step takes besides")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--any-recipe", action="store_true")
    parser.add_argument("--judged", help="losses of evaluations after steps, to keep the best: {step: loss}")
    parser.add_argument("--stop-at", type=int, help="the step in which the last rank is asked to stop")
    parser.add_argument("--by", default="SIGTERM", help="which signal asks")
    args = parser.parse_args()

    with dure.start(args, seed=args.seed) as team:
        net, critic = Net(2), Net(1)
        models = {"net": team.replicate(net), "critic": team.replicate(critic)}
        average = torch.optim.swa_utils.AveragedModel(net)
        optimizers = {
            "net": torch.optim.AdamW(models["net"].parameters(), lr=0.01, fused=True),
            "critic": torch.optim.SGD(models["critic"].parameters(), lr=0.05, momentum=0.9),
        }
        schedules = {
            name: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
            for name, optimizer in optimizers.items()
        }
        extra = {
            "average": average,
            "seen": Seen(),
            "best": float("inf"),
            "last": torch.full((3,), torch.inf),
        }
        batches = team.batches(Points(), global_batch=args.batch, steps=args.steps)
        saved = team.checkpoint(
            model=models,
            optimizer=optimizers,
            schedule=schedules,
            extra=extra,
            every=args.every,
            memory_every=args.memory_every or "auto",
            folder=args.folder,
            any_recipe=args.any_recipe,
            keep_best="loss" if args.judged else None,
        )
        judged = json.loads(args.judged or "{}")
        began = saved.resume()
        if team.is_leader:
            print(f"began at {began} on {team.topology.size}", flush=True)
        for batch in batches:
            if batch.step == args.stop_at and team.rank == team.topology.size - 1:
                os.kill(os.getpid(), getattr(signal, args.by))
            losses = [
                team.step(
                    models["net"], optimizers["net"], batch, F.cross_entropy, schedule=schedules["net"]
                ),
                team.step(
                    models["critic"], optimizers["critic"], batch, of_critic, schedule=schedules["critic"]
                ),
            ]
            average.update_parameters(net)
            extra["seen"].losses.append(losses)
            extra["seen"].ids[batch.step % 48] += batch.size
            extra["best"] = min(extra["best"], losses[0])
            extra["last"][0] = losses[1]
            extra.setdefault("began", batch.step)
            time.sleep(args.nap)
            loss = judged.get(str(batch.step + 1))
            saved.save_if_due(None if loss is None else {"loss": loss, "accuracy": -loss})
        if team.is_leader:
            values = [
                extra["seen"].losses,
                extra["seen"].ids.tolist(),
                extra["best"],
                str(extra["last"]),
                extra["began"],
            ]
            found = [weights_sha256(module) for module in (net, critic, average)]
            with open(args.out, "w") as file:
                json.dump({"found": found, "values": values, "steps": saved.step}, file)


def of_critic(output, target):
    return F.binary_cross_entropy_with_logits(output.squeeze(1), target.float(), reduction="none")


if __name__ == "__main__":
    main()
