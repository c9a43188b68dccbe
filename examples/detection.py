"""Detection: pictures with any number of boxes, a collate function that keeps them as lists, a model with two losses.

dure run --ranks 4 detection.py
python detection.py --steps 20       (one rank: the same bits)
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import dure

SIZE, CELLS = 32, 4


class Squares(Dataset):
    """Grey pictures with up to three bright squares, and where they are: (x, y, side), as parts of the picture."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        dice = torch.Generator().manual_seed(index)
        picture, boxes = torch.rand(1, SIZE, SIZE, generator=dice) * 0.3, []
        for _ in range(index % 4):  # none at all in every fourth picture
            x, y, side = torch.randint(4, 9, (3,), generator=dice).mul(torch.tensor([3, 3, 1])).tolist()
            picture[0, y : y + side, x : x + side] = 1.0
            boxes.append([(x + side / 2) / SIZE, (y + side / 2) / SIZE, side / SIZE])
        return picture, {"boxes": torch.tensor(boxes).view(-1, 3)}


def keep_lists(samples):
    """Pictures have one size here, boxes have not: a list of dicts, as detectors take them."""
    pictures, targets = zip(*samples, strict=True)
    return list(pictures), list(targets)


class Detector(nn.Module):
    """For each cell of the picture: is a square's middle in it, and where exactly."""

    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        last = nn.Conv2d(32, 4, 1)
        self.body = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(CELLS), last)

    def forward(self, pictures, targets):
        """Losses by name, each one number per picture."""
        found = self.body(torch.stack(pictures))
        there, boxes = torch.zeros(len(pictures), CELLS, CELLS), torch.zeros(len(pictures), 3, CELLS, CELLS)
        for at, target in enumerate(targets):
            for box in target["boxes"]:
                column, row = (min(int(place * CELLS), CELLS - 1) for place in box[:2])
                there[at, row, column] = 1.0
                boxes[at, :, row, column] = box
        objects = F.binary_cross_entropy_with_logits(found[:, 0], there, reduction="none").flatten(1).sum(1)
        places = ((found[:, 1:].sigmoid() - boxes).abs() * there[:, None]).flatten(1).sum(1)
        return {"objects": objects, "boxes": places}


def train(team, steps=60):
    """Returns the replica and the last loss."""
    model = team.replicate(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for batch in team.batches(Squares(), global_batch=24, steps=steps, collate=keep_lists):
        # The model returns losses by name, one number per picture each; here they are added up.
        lost = team.step(model, optimizer, batch, forward=lambda model, part: sum(model(*part).values()))
    return model, lost


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[dure.arguments()])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    with dure.start(args, seed=1) as team:
        model, _ = train(team, args.steps)
        print(f"rank {team.rank}: {team.prove(model)}", flush=True)
