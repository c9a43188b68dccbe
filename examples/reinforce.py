"""Reinforcement learning in a loop of one's own: episodes are played inside the step, with the policy of that moment.

    dure run --ranks 4 reinforce.py
    python reinforce.py --steps 20       (one rank: the same bits)

A sample is the number of an episode. Whoever computes its shard plays it, with random numbers that are seeded by
(seed, step, shard), so the episodes are the same on any number of ranks.
"""

import argparse

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import Dataset

import dure

EPISODES, MOVES, GOAL = 64, 12, 4.0


class Episodes(Dataset):
    """Where each episode begins: a walker on a line."""

    def __len__(self):
        return EPISODES

    def __getitem__(self, index):
        return torch.tensor(-3.0 + 6.0 * index / EPISODES)


def policy():
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))


def play(model, places):
    """All episodes of a shard at once; returns what was won and the log-probability of what was done."""
    won, said = torch.zeros(len(places)), torch.zeros(len(places))
    for move in range(MOVES):
        seen = torch.stack([places, torch.full_like(places, move / MOVES)], dim=1)
        choice = Categorical(logits=model(seen))
        step = choice.sample()
        said = said + choice.log_prob(step)
        places = places + (step - 1) + 0.1 * torch.randn(len(places))
        won = won - (places - GOAL).abs() / MOVES
    return won, said


def train(team, steps=80):
    """Returns the replica, and what episodes won on average before and after."""
    model = team.replicate(policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    rewards, won_by_shard = [0.0], []

    def lost(model, places):
        won, said = play(model, places)
        won_by_shard.append([float(won.sum()), len(won)])
        return -(won.detach() - rewards[-1]) * said

    for batch in team.batches(Episodes(), global_batch=EPISODES, steps=steps):
        team.step(model, optimizer, batch, forward=lost, clip_norm=1.0)
        # Everyone's sums in the order of the shards: the next step's baseline has the same bits on any number of ranks.
        own = (
            [] if batch.idle else won_by_shard[-len(batch.shards) :]
        )  # before the first step, a probe played too
        shards = [shard for rank in team.gather(own) for shard in rank]
        rewards.append(sum(won for won, _ in shards) / sum(count for _, count in shards))
        if batch.step % 20 == 0:
            team.print(f"step {batch.step}: an episode wins {rewards[-1]:.3f}")
    return model, rewards[1], rewards[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[dure.arguments()])
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    with dure.start(args, seed=1) as team:
        model, first, last = train(team, args.steps)
        team.print(f"won {first:.3f} at first, {last:.3f} at last")
        print(f"rank {team.rank}: {team.prove(model)}", flush=True)
