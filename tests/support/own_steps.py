"""Steps as people write them, each trained for a few steps inside one team."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import dure
from dure.base.errors import DureError
from dure.device.fingerprint import weights_sha256
from support.features import Points, Tied, Words, plain, with_dropout_and_batchnorm

STEPS = 7


def adam(module, lr=1e-2):
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr, fused=True)


def same(function):
    """Trained on the same points, 16 at a time."""

    def train(team):
        torch.manual_seed(3)
        return function(team, team.batches(Points(), global_batch=16, steps=STEPS, drop_last=True))

    return train


def unreduced(model, part):
    points, labels = part
    return F.cross_entropy(model(points), labels, reduction="none")


@same
def whole_forward(team, batches):
    model = team.replicate(with_dropout_and_batchnorm())
    optimizer = adam(model)
    for batch in batches:
        loss = team.step(model, optimizer, batch, forward=unreduced, clip_norm=0.5)
        team.prove(model, optimizer, batch.step)
    return weights_sha256(model.module), loss


@same
def loss_of_output(team, batches):
    """What `whole_forward` must equal, bit for bit."""
    model = team.replicate(with_dropout_and_batchnorm())
    optimizer = adam(model)
    for batch in batches:
        loss = team.step(model, optimizer, batch, F.cross_entropy, clip_norm=0.5)
    return weights_sha256(model.module), loss


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))

    def draw(self, count):
        return self.body(torch.randn(count, 4))


def critic():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


@same
def gan(team, batches):
    """Two steps per batch; each model's step runs the other too, whose BatchNorm must not count shards."""
    generator, discriminator = team.replicate(Generator(), find_unused=True), team.replicate(critic())
    optimizers = adam(generator), adam(discriminator)
    fixed = []
    for batch in batches:

        def judge(model, part):
            real, fake = (
                model(part[0]),
                model(generator.module.draw(len(part[0]))),
            )  # not detached: no gradient
            return F.softplus(-real) + F.softplus(fake)

        team.step(discriminator, optimizers[1], batch, forward=judge)
        fixed.append(float(discriminator.module[1].running_mean.sum()))
        loss = team.step(
            generator,
            optimizers[0],
            batch,
            forward=lambda model, part: F.softplus(-discriminator(model.draw(len(part[0])))),
        )
        assert all(p.grad is not None for p in generator.parameters())
        team.prove(generator, optimizers[0], batch.step)
        team.prove(discriminator, optimizers[1], batch.step)
    assert len(set(fixed)) == STEPS
    return weights_sha256(generator.module), weights_sha256(discriminator.module), loss


@same
def both_before_updates(team, batches):
    """Both gradients first, then both updates: neither model's gradient may hold some of the other's."""
    generator, discriminator = team.replicate(Generator()), team.replicate(critic())
    optimizers = adam(generator), adam(discriminator)
    for batch in batches:
        team.forward_backward(
            discriminator,
            batch,
            forward=lambda d, part: (
                F.softplus(-d(part[0])) + F.softplus(d(generator.module.draw(len(part[0]))))
            ),
        )
        team.forward_backward(
            generator, batch, forward=lambda g, part: F.softplus(-discriminator.module(g.draw(len(part[0]))))
        )
        team.update(discriminator, optimizers[1])
        team.update(generator, optimizers[0])
        team.prove(discriminator, optimizers[1])
    return weights_sha256(generator.module), weights_sha256(discriminator.module)


@same
def gradient_penalty(team, batches):
    model = team.replicate(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = adam(model)

    def penalised(critic, part):
        points, labels = part
        mixed = (points + torch.rand(len(points), 1) * torch.randn_like(points)).requires_grad_()
        scores = critic(mixed)
        (slope,) = torch.autograd.grad(scores.sum(), mixed, create_graph=True)
        return F.softplus(scores[:, 0] * (1 - 2 * labels)) + 10 * (slope.norm(dim=1) - 1) ** 2

    for batch in batches:
        loss = team.step(model, optimizer, batch, forward=penalised)
        team.prove(model, optimizer, batch.step)
    return weights_sha256(model.module), loss


@same
def two_views(team, batches):
    """Several forward passes per step, in micro-batches, and a method of the model that is not `forward`."""

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = with_dropout_and_batchnorm(), nn.Linear(2, 3)

        def embed(self, points):
            return F.normalize(self.head(self.body(points)), dim=1)

    model = team.replicate(Views())
    optimizer = adam(model)
    for batch in team.batches(Points(), global_batch=32, steps=STEPS, accumulate=2):
        loss = team.step(
            model,
            optimizer,
            batch,
            forward=lambda views, part: (
                2 - 2 * (views.embed(part[0]) * views.embed(part[0] + torch.randn_like(part[0]) * 0.1)).sum(1)
            ),
        )
    return weights_sha256(model.module), loss


@same
def averaged(team, batches):
    """A moving average, as torch has it; its evaluation, beside the model's."""
    model = team.replicate(with_dropout_and_batchnorm())
    optimizer = adam(model)
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for batch in batches:
        team.step(model, optimizer, batch, forward=unreduced, ema=ema)
    judged = [
        team.evaluate(one, Points(noise=False), {"loss": F.cross_entropy}, batch=10).metrics["loss"]
        for one in (model, ema)
    ]
    assert judged[0] != judged[1]
    return weights_sha256(ema), team.prove(ema), judged


class Halving:
    """A schedule of one's own: any object with `step`."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 ** (self.steps // 3)


@same
def two_optimizers(team, batches):
    """One loss through two models in one replica, each with an optimizer and a schedule of its own."""
    pair = nn.ModuleDict({"body": plain(), "head": nn.Linear(2, 2)})
    model = team.replicate(pair)
    optimizers = [torch.optim.SGD(pair["body"].parameters(), lr=0.1), adam(pair["head"])]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizers[0], 2), Halving(optimizers[1])]
    for batch in batches:
        loss = team.step(
            model,
            optimizers,
            batch,
            forward=lambda two, part: F.cross_entropy(
                two["head"](two["body"](part[0])), part[1], reduction="none"
            ),
            schedule=schedules,
        )
    assert schedules[1].steps == STEPS
    assert optimizers[1].param_groups[0]["lr"] == 1e-2 * 0.25
    return weights_sha256(pair), loss


@same
def in_turn(team, batches):
    """One replica whose parts have losses of their own: each step leaves the other part alone."""
    pair = nn.ModuleDict({"left": plain(), "right": plain()})
    model = team.replicate(pair, find_unused=True)
    optimizers = {name: adam(pair[name]) for name in pair}
    for batch in batches:
        for name in pair:
            before = {other: weights_sha256(pair[other]) for other in pair}
            team.step(
                model,
                optimizers[name],
                batch,
                forward=lambda two, part, name=name: F.cross_entropy(
                    two[name](part[0]), part[1], reduction="none"
                ),
            )
            assert [other for other in pair if weights_sha256(pair[other]) != before[other]] == [name]
    return weights_sha256(pair)


def tokens(team):
    """Batches that are dicts, and a loss per token: shards differ in what they count."""

    class Sentences(Dataset):
        def __len__(self):
            return len(Words())

        def __getitem__(self, index):
            words, target = Words()[index]
            return {"words": words, "target": target}

    torch.manual_seed(3)
    model = team.replicate(Tied())
    optimizer = adam(model)

    def summed(tied, part):
        counted = part["target"] != -100
        losses = F.cross_entropy(tied(part["words"]).flatten(0, 1), part["target"].flatten(), reduction="sum")
        return losses, counted.sum()

    for batch in team.batches(Sentences(), global_batch=9, steps=STEPS):
        loss = team.step(model, optimizer, batch, forward=summed)
    found = team.evaluate(
        model,
        Sentences(),
        {"loss": F.cross_entropy},
        batch=10,
        forward=lambda tied, part: (tied(part["words"]), part["target"]),
    )
    return weights_sha256(model.module), loss, found.metrics


@same
def not_means(team, batches):
    """Measures over all samples: the same bits, and exactly what all outputs in order give."""
    model = team.replicate(with_dropout_and_batchnorm())
    optimizer = adam(model)
    for batch in batches:
        team.step(model, optimizer, batch, F.cross_entropy)
    data = Points(samples=37, noise=False)
    seen = {}

    def order(outputs, targets):
        seen["outputs"], seen["targets"] = outputs, targets
        return {"first": outputs[0, 0], "rows": len(outputs)}

    found = team.evaluate(
        model, data, {"accuracy": "accuracy"}, batch=10,
        gathered={"f1": "f1", "auroc": "auroc", "confusion": "confusion", "order": order},
    )  # fmt: skip
    with torch.no_grad():
        model.module.eval()
        alone = torch.cat([model.module(data[at][0][None]) for at in range(len(data))])
    assert seen["targets"].tolist() == [data[at][1] for at in range(len(data))]
    torch.testing.assert_close(seen["outputs"], alone)
    table = torch.tensor(found.values["confusion"])
    assert table.sum() == 37
    assert found.metrics["accuracy"] == float(table.diagonal().sum()) / 37
    assert found.metrics["confusion.0.1"] == table[0, 1]
    return found.metrics, found.values


STEPS_OF_PEOPLE = {
    "whole forward": whole_forward,
    "loss of output": loss_of_output,
    "gan": gan,
    "both before updates": both_before_updates,
    "gradient penalty": gradient_penalty,
    "two views": two_views,
    "averaged": averaged,
    "two optimizers": two_optimizers,
    "in turn": in_turn,
    "tokens": tokens,
    "not means": not_means,
}


def refusals(team):
    """What cannot be exact, and the words it is refused with."""
    data = Points(noise=False)
    head = nn.Linear(2, 2)
    teacher = plain()

    def mean(model, part):
        return F.cross_entropy(model(part[0]), part[1])

    def backward(model, part):
        unreduced(model, part).sum().backward()
        return unreduced(model, part)

    def writes(model, part):
        with torch.no_grad():
            teacher[0].weight.mul_(0.9)
        return unreduced(model, part)

    def first(team, **changes):
        model = team.replicate(plain())
        batch = next(iter(team.batches(data, global_batch=16, steps=1)))
        given = {"model": model, "optimizer": adam(model), "batch": batch, "forward": unreduced, **changes}
        optimizer = given["optimizer"]
        given["optimizer"] = optimizer(model) if isinstance(optimizer, type(lambda: 0)) else optimizer
        team.step(**given)

    cases = {
        "mean": {"forward": mean},
        "backward": {"forward": backward},
        "writes": {"forward": writes},
        "two losses": {"loss": F.cross_entropy},
        "no loss": {"forward": None},
        "several models": {"model": [plain(), plain()]},
        "foreign parameter": {"optimizer": adam(head)},
        "lbfgs": {"optimizer": lambda model: torch.optim.LBFGS(model.parameters())},
        "plateau": {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau(adam(head))},
        "no step": {"schedule": object()},
    }
    said = {}
    for name, changes in cases.items():
        try:
            first(team, **changes)
            said[name] = "accepted"
        except DureError as error:
            said[name] = str(error)
    return said


def train_all(names, audit=0.0):
    """Entry point of a rank."""
    with dure.start(seed=5, audit=audit) as team:
        return {name: STEPS_OF_PEOPLE[name](team) for name in names}


def refused():
    """Entry point of a rank."""
    with dure.start(seed=5) as team:
        return refusals(team)
