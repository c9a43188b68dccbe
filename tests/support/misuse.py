"""What scripts do wrong, one case each; `refusals` returns what each is told, on every rank alike."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import dure
from dure.base.errors import DureError


def points(n=61, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(n, 6, generator=generator), torch.randint(0, 2, (n,), generator=generator)
    )


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(team, module=None, data=None, steps=4, before=lambda *_: None, loss=F.cross_entropy):
    model = team.replicate(module or net())
    optimizer = sgd(model)
    for batch in team.batches(data or points(), global_batch=16, steps=steps):
        before(team, model, batch)
        team.step(model, optimizer, batch, loss)


class Cached(Dataset):
    """Keeps what it augmented."""

    def __init__(self):
        self.kept = {}

    def __len__(self):
        return 61

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = torch.randn(6)
        return self.kept[index], index % 2


class OwnGenerator(Dataset):
    """Draws from a generator of its own, for some samples."""

    def __init__(self):
        self.dice = torch.Generator()

    def __len__(self):
        return 61

    def __getitem__(self, index):
        noise = torch.randn(6, generator=self.dice) if index > 40 else torch.zeros(6)
        return noise, index % 2


class ReadsRank(Dataset):
    def __len__(self):
        return 61

    def __getitem__(self, index):
        return torch.full((6,), float(os.environ.get("RANK", "0")) + index), index % 2


class ModelReadsRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return self.inner(x) * (1 + int(os.environ.get("RANK", "0")))


class NormalisesData(nn.Module):
    """Its weights have norm 1 at first, so that nothing is to be done before the first update."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(6, 2)
        self._normalise()
        self._normalise()

    def _normalise(self):
        weight = self.inner.weight.data
        norm = weight.norm()
        if abs(float(norm) - 1.0) > 1e-6:
            weight.mul_(1.0 / norm)

    def forward(self, x):
        self._normalise()
        return self.inner(x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)


class WithBuffer(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.inner = net()
        self.register_buffer("odd", buffer)

    def forward(self, x):
        return self.inner(x)


def a_dataset_that_caches(team):
    train(team, data=Cached())


def a_generator_of_its_own(team):
    train(team, data=OwnGenerator())


def a_dataset_that_reads_the_rank(team):
    train(team, data=ReadsRank())


def a_model_that_reads_the_rank(team):
    train(team, ModelReadsRank())


def split_before(team):
    train(team, data=Subset(points(60), range(team.rank, 60, 2)))


def split_before_with_unequal_lengths(team):
    train(team, data=Subset(points(61), range(team.rank, 61, 2)))


def a_batch_skipped_on_one_rank(team):
    model = team.replicate(net())
    optimizer = sgd(model)
    for batch in team.batches(points(), global_batch=16, steps=4):
        if team.rank == 1 and batch.step == 1:
            continue
        team.step(model, optimizer, batch, F.cross_entropy)


def gradients_dropped(team):
    model = team.replicate(net())
    for batch in team.batches(points(), global_batch=16, steps=4):
        team.forward_backward(model, batch, F.cross_entropy)


def a_loader_in_place_of_batches(team):
    model = team.replicate(net())
    for batch in DataLoader(points(), batch_size=16):
        team.step(model, sgd(model), batch, F.cross_entropy)


def a_mean_loss(team):
    train(team, loss=lambda output, target: F.cross_entropy(output, target).reshape(()))


def a_loss_that_is_no_tensor(team):
    train(team, loss=lambda output, target: 1.0)


def backward_outside_of_a_step(team):
    def outside(_team, model, _batch):
        model(torch.ones(3, 6)).sum().backward()

    train(team, before=outside)


def a_replica_inside_of_anothers_loss(team):
    judge = team.replicate(nn.Linear(2, 2))

    def judged(output, target):
        return F.cross_entropy(judge(output), target, reduction="none")

    train(team, loss=judged)


def frozen_after_replicate(team):
    def freeze(_team, model, batch):
        if batch.step == 1:
            model.module[0].weight.requires_grad_(False)

    train(team, before=freeze)


def hooked_after_replicate(team):
    def hook(_team, model, batch):
        if batch.step == 1:
            model.module[0].weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(0.5))

    train(team, before=hook)


def unfrozen_after_replicate(team):
    def unfreeze(_team, model, batch):
        if batch.step == 1:
            model.module[0].requires_grad_(True)

    module = net()
    module[0].requires_grad_(False)
    train(team, module, before=unfreeze)


def weights_normalised_through_data(team):
    train(team, NormalisesData())


def an_expanded_buffer(team):
    train(team, WithBuffer(torch.zeros(1).expand(4)))


def a_sparse_buffer(team):
    train(team, WithBuffer(torch.eye(4).to_sparse()))


def reentrant_checkpointing(team):
    train(team, Checkpointed())


def a_detached_output(team):
    train(team, loss=lambda output, target: F.cross_entropy(output.detach(), target, reduction="none"))


ON_ANY = {
    gradients_dropped: ["forward_backward of step 1", "gradients of step 0", "team.update", "accumulate=N"],
    a_loader_in_place_of_batches: ["a batch of team.batches, not a list", "DataLoader"],
    a_mean_loss: ["returns one number", '(reduction="none")'],
    a_loss_that_is_no_tensor: ["returns a float"],
    backward_outside_of_a_step: ["outside of team.step", "model.module(...)"],
    a_replica_inside_of_anothers_loss: ["outside of team.step", "model.module(...)"],
    frozen_after_replicate: ["frozen after team.replicate"],
    hooked_after_replicate: ["0.weight has a hook that is called when its gradient was accumulated"],
    unfrozen_after_replicate: ["0.weight was unfrozen after team.replicate"],
    weights_normalised_through_data: ["writes the parameter inner.weight"],
    an_expanded_buffer: ["the buffer odd is expanded", ".clone()"],
    a_sparse_buffer: ["the buffer odd is sparse"],
    reentrant_checkpointing: ["use_reentrant=False"],
    a_detached_output: ["does not depend on any trained parameter"],
    a_generator_of_its_own: ["read twice, gives other bits"],
}
ON_TWO = {
    a_dataset_that_caches: ["other bits on rank 1", "a cache of augmented samples"],
    a_dataset_that_reads_the_rank: ["sample 0 has other bits on rank 1 than on rank 0"],
    a_model_that_reads_the_rank: ["computes other bits from the same samples", "look at the rank"],
    split_before: ["whole dataset", "split"],
    split_before_with_unequal_lengths: ["31 samples on rank 0 and 30 on rank 1", "the whole dataset"],
    a_batch_skipped_on_one_rank: ["is in step 2, the others are in step", "every rank must take every batch"],
}


def refusals(names):
    """Entry point: what each case is told. All ranks are refused alike, so that one team serves for all cases."""
    told = {}
    with dure.start(seed=1, hang_seconds=60) as team:
        for name in names:
            try:
                globals()[name](team)
                told[name] = "nothing"
            except DureError as error:
                told[name] = f"{type(error).__name__}: {error}"
    return told


def two_sample_shards():
    """Entry point: an unreduced loss on shards of two samples; the sha256 of the weights."""
    from dure.device.fingerprint import weights_sha256

    with dure.start(seed=1, hang_seconds=60) as team:
        module = net()
        model = team.replicate(module)
        optimizer = sgd(model)
        for batch in team.batches(points(64), global_batch=16, steps=8):
            team.forward_backward(model, batch, lambda o, t: F.cross_entropy(o, t, reduction="none"))
            team.update(model, optimizer)
        return weights_sha256(module)


def different_calls(how):
    """Entry point: never returns on all ranks."""
    with dure.start(seed=1, hang_seconds=120) as team:
        model = team.replicate(net())
        optimizer = sgd(model)
        for batch in team.batches(points(), global_batch=16, steps=6):
            if batch.step == 3 and team.is_leader:
                if how == "evaluate":
                    team.evaluate(model, points(seed=2), {"loss": F.cross_entropy}, batch=16)
                else:
                    break
            team.step(model, optimizer, batch, F.cross_entropy)
        if how != "leave":
            team.prove(model, optimizer)
