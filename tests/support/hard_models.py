"""Models and loops that once broke the promise, or nearly: each is trained inside one team."""

import random

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import dure
from dure.device.fingerprint import weights_sha256
from dure.step.loss import as_sum

STEPS = 6


class Points(Dataset):
    """Points in a plane, drawn anew at every access (seeded by the team)."""

    def __init__(self, samples=61):
        self.points = torch.randn(samples, 6, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index] + torch.randn(6) * 0.1, int(self.points[index].sum() > 0)


class Pictures(Dataset):
    def __len__(self):
        return 37

    def __getitem__(self, index):
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)), index % 2


def plain():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def channels_last():
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 2))
    return body.to(memory_format=torch.channels_last)


class OddLayouts(nn.Module):
    """Transposed, permuted, with gaps, without a dimension, without an element, in two types."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(8, 6).t())
        self.gaps = nn.Parameter(torch.randn(8, 12)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.exact = nn.Parameter(torch.randn(6, 2, dtype=torch.float64))
        self.permuted = nn.Parameter(torch.randn(4, 3, 2).permute(2, 0, 1))
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, points):
        inner = (points @ self.transposed @ self.gaps * self.scale + self.empty.sum()).double()
        return inner @ self.exact + self.permuted.double().square().sum((1, 2))


class Running(nn.Module):
    """Writes its buffer in eval mode too."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 16), nn.Linear(16, 2)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, points):
        hidden = self.inner(points)
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.out(hidden - self.mean)


class Langevin(torch.optim.SGD):
    """Adds noise to every update."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def adam(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


def train(team, module, make_optimizer=adam, dataset=Points, before=None):
    """A loop; `before(team, model, optimizer)` is called before every step."""
    model, optimizer = team.replicate(module), make_optimizer(module)
    for batch in team.batches(dataset(), global_batch=16, steps=STEPS):
        if before is not None:
            before(team, model, optimizer)
        team.step(model, optimizer, batch, F.cross_entropy)
        team.prove(model, optimizer, batch.step)
    return weights_sha256(module)


def evaluated_between_steps(team):
    def judge(team, model, _):
        team.evaluate(model, Points(29), {"loss": F.cross_entropy}, batch=10)

    return train(team, Running(), before=judge)


def learning_rate_drawn_by_the_user(team):
    def draw(_team, _model, optimizer):
        optimizer.param_groups[0]["lr"] = 1e-2 * random.random() + 1e-3 * numpy.random.rand()

    return train(team, plain(), before=draw)


def backward_of_the_user_between_steps(team):
    def backward(_team, model, _):
        model.module(torch.ones(3, 6)).sum().backward()

    return train(team, plain(), before=backward)


def gradients_computed_twice(team):
    module = plain()
    model, optimizer = team.replicate(module), adam(module)
    for batch in team.batches(Points(), global_batch=16, steps=STEPS):
        team.forward_backward(model, batch, as_sum(F.cross_entropy))
        team.forward_backward(model, batch, as_sum(F.cross_entropy))
        team.update(model, optimizer)
    return weights_sha256(module)


def a_step_skipped_after_nan(team):
    module = plain()
    model, optimizer, skipped = team.replicate(module), adam(module), 0
    for batch in team.batches(Points(), global_batch=16, steps=STEPS):
        factor = float("nan") if batch.step == 2 else 1.0
        try:
            team.step(
                model, optimizer, batch, lambda o, t, f=factor: F.cross_entropy(o, t, reduction="none") * f
            )
        except dure.base.errors.NotFinite:
            skipped += 1
    assert skipped == 1
    assert all(torch.isfinite(p).all() for p in module.parameters())
    return weights_sha256(module)


def two_models_with_one_loss(team):
    maker, judge = nn.Linear(6, 6), plain()
    made, judged = team.replicate(maker), team.replicate(judge)
    of_maker, of_judge = adam(maker), adam(judge)
    for batch in team.batches(Points(), global_batch=16, steps=STEPS):
        team.step(made, of_maker, batch, lambda output, _: F.softplus(-judge(output)))
        team.step(judged, of_judge, batch, lambda output, _: F.softplus(output))
    return weights_sha256(maker), weights_sha256(judge)


CASES = {
    "channels_last": lambda team: train(team, channels_last(), dataset=Pictures),
    "odd layouts": lambda team: train(team, OddLayouts(), lambda m: torch.optim.SGD(m.parameters(), lr=0.05)),
    "noise in the optimizer": lambda team: train(team, plain(), lambda m: Langevin(m.parameters(), lr=0.05)),
    **{
        case.__name__.replace("_", " "): case
        for case in (
            evaluated_between_steps,
            learning_rate_drawn_by_the_user,
            backward_of_the_user_between_steps,
            gradients_computed_twice,
            a_step_skipped_after_nan,
            two_models_with_one_loss,
        )
    },
}


def train_all():
    """Entry point of a rank: every case, one after the other, in one team."""
    found = {}
    with dure.start(seed=5) as team:
        for name, case in CASES.items():
            torch.manual_seed(3)
            found[name] = case(team)
    return found


def train_apart(samples):
    """Entry point of a rank: without synchronisation, some ranks have nothing to do in some steps."""
    with dure.start(seed=5, sync=False) as team:
        module = plain()
        model, optimizer = team.replicate(module), adam(module)
        for batch in team.batches(Points(samples), global_batch=16, epochs=2):
            team.step(model, optimizer, batch, F.cross_entropy)
        return weights_sha256(module)


def loss_with_a_bad_count():
    """Entry point of a rank: a count that is no number fails in the communication thread."""
    with dure.start(seed=5) as team:
        model = team.replicate(plain())
        for batch in team.batches(Points(), global_batch=16, steps=1):
            team.forward_backward(
                model, batch, lambda o, t: (F.cross_entropy(o, t, reduction="sum"), torch.ones(2))
            )


def nan_in_the_gradients_alone():
    """Entry point of a rank: the root of zero is fine, its slope is not."""
    with dure.start(seed=5) as team:
        module = plain()
        model, optimizer = team.replicate(module), adam(module)
        for batch in team.batches(Points(), global_batch=16, steps=1):
            team.step(model, optimizer, batch, lambda o, _: torch.sqrt((o * 0).sum(-1)), clip_norm=1.0)
