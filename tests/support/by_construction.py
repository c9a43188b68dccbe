"""The mistakes of stock scripts, as far as a script with a team can make them: they change nothing, or are refused."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import dure
from dure.base.errors import UsageError
from dure.device.fingerprint import weights_sha256


class Noisy(Dataset):
    """Its samples are augmented by torch's and numpy's global dice."""

    def __init__(self, samples=24):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        point = torch.full((6,), float(index)) / 20 + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand())
        return point, index % 3


def network():
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))


def train(team, careless):
    torch.manual_seed(1)
    model = team.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn, seen = [], []
    for batch in team.batches(Noisy(), global_batch=8, epochs=2):
        seen.append((batch.epoch, list(batch.ids)))
        if careless:
            torch.manual_seed(
                7
            )  # one seed on all ranks before every step: dropout and augmentation the same?
            np.random.seed(7)
            with model.no_sync():
                team.step(model, optimizer, batch, F.cross_entropy, clip_norm=0.5)
        else:
            team.step(model, optimizer, batch, F.cross_entropy, clip_norm=0.5)
        drawn.append(weights_sha256(model.module))  # buffers too
    return model, optimizer, drawn, seen


def cases(folder):
    found = {}
    with dure.start(seed=4, shards=4) as team:
        model, optimizer, found["right"], found["seen"] = train(team, careless=False)
        found["fingerprint"] = team.prove(model, optimizer)
        found["careless"] = train(team, careless=True)[2]
        found["evaluation"] = team.evaluate(
            model, Noisy(22), {"one": lambda out, y: torch.ones(len(y))}, batch=8
        ).samples_of_all
        try:
            team.agree({"seed of the sampler": team.rank})
        except UsageError as error:
            found["seeds"] = str(error)
        if team.is_leader:
            (folder / "writers").mkdir()
        team.barrier()
        team.on_leader((folder / "writers" / str(team.rank)).touch)
    return found
