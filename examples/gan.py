"""A GAN: two models, two optimizers, two steps over the same batch. The generator learns to draw points on a ring.

dure run --ranks 4 gan.py
python gan.py --steps 50             (one rank: the same bits)
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dure

NOISE = 8


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))

    def draw(self, count):
        # From the global generator, which is seeded by (seed, step, shard): the same noise on any number of ranks.
        return self.body(torch.randn(count, NOISE))


def critic():
    return nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )


def ring(points=512):
    angles = torch.linspace(0, 2 * math.pi, points + 1)[:-1]
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))


def train(team, steps=300):
    """Returns both replicas, and how far drawn points are from the ring, on average."""
    generator, discriminator = team.replicate(Generator()), team.replicate(critic())
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9), fused=True)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9), fused=True)

    def judged(model, batch):
        """What the discriminator loses: real points, drawn points, and a gradient penalty (R1) on the real ones."""
        (real,) = batch
        real = real.requires_grad_()
        scores = model(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        # The generator gets no gradient here: it is not the model of this step.
        drawn = model(generator.module.draw(len(real)))
        return F.softplus(-scores[:, 0]) + F.softplus(drawn[:, 0]) + 0.5 * slope.square().sum(1)

    def fooled(model, batch):
        """What the generator loses. Unreduced: one number per sample, so that uneven batches weigh right."""
        return F.softplus(-discriminator(model.draw(len(batch[0]))))[:, 0]

    for batch in team.batches(ring(), global_batch=64, steps=steps):
        lost = team.step(discriminator, of_discriminator, batch, forward=judged)
        team.step(generator, of_generator, batch, forward=fooled)
        if batch.step % 100 == 0:
            team.print(f"step {batch.step}: the discriminator's loss {lost:.4f}")
    torch.manual_seed(0)
    with torch.no_grad():
        off = float((generator.module.eval().draw(256).norm(dim=1) - 1).abs().mean())
    return generator, discriminator, off


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[dure.arguments()])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    with dure.start(args, seed=1) as team:
        generator, discriminator, off = train(team, args.steps)
        # A proof compares all ranks, so all ranks make it, and one of them prints.
        proved = team.prove(generator), team.prove(discriminator)
        team.print(f"drawn points are {off:.3f} off the ring; weights {' '.join(proved)}")
