"""Stock DDP loops with one silent mistake each, and the same loops without it; and what the watch says of them."""

import contextlib
import copy
import io
import json
import sys
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dure.base.run_folder import RunFolder
from dure.proof.detectors.watch import Watch


def dataset(samples=65):
    dice = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 8, generator=dice), torch.randint(4, (samples,), generator=dice)
    )


def network(dropout=0.0, norm=False):
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def loop(model, *, epochs=2, sets_epoch=True, seed=0, sampler=None, data=None, on_step=None, batch=4):
    """What everybody writes."""
    data = dataset() if data is None else data
    sampler = DistributedSampler(data, seed=seed) if sampler is None else sampler
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        if sets_epoch:
            sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if on_step is not None:
                on_step(epoch, step)
    return optimizer


def own_numbers():
    """What a script should do once its replicas are made."""
    torch.manual_seed(1000 + dist.get_rank())


def plain():
    loop(DistributedDataParallel(network()))


def forgotten_epoch():
    loop(DistributedDataParallel(network()), sets_epoch=False)


def looked_into_first():
    """A batch is looked at before the loop, in the same epoch: no mistake."""
    data = dataset()
    sampler = DistributedSampler(data)
    next(iter(DataLoader(data, batch_size=4, sampler=sampler)))
    loop(DistributedDataParallel(network()), sampler=sampler, data=data)


def not_shuffled():
    sampler = DistributedSampler(dataset(), shuffle=False)
    loop(DistributedDataParallel(network()), sampler=sampler, sets_epoch=False)


def evaluate(model, data, sampler):
    right = seen = 0
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=4, sampler=sampler):
            right, seen = right + int((model(x).argmax(1) == y).sum()), seen + len(y)
    return right, seen


def padded_evaluation():
    model, data = DistributedDataParallel(network()), dataset(31)
    loop(model)
    evaluate(model, data, DistributedSampler(data, shuffle=False))


def whole_evaluation():
    """As many samples for every rank: nothing is padded."""
    model, data = DistributedDataParallel(network()), dataset(10 * dist.get_world_size())
    loop(model)
    evaluate(model, data, DistributedSampler(data, shuffle=False))


def other_seeds():
    loop(DistributedDataParallel(network()), seed=dist.get_rank())


def other_epochs():
    model, data = DistributedDataParallel(network()), dataset()
    sampler = DistributedSampler(data)
    sampler.set_epoch(dist.get_rank())
    loop(model, sampler=sampler, data=data, sets_epoch=False, epochs=1)


def no_sampler():
    torch.manual_seed(5)
    data = dataset()
    sampler = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(5))
    loop(DistributedDataParallel(network()), sampler=sampler, data=data, sets_epoch=False)


def all_say_rank_0():
    data = dataset()
    sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=0)
    loop(DistributedDataParallel(network()), sampler=sampler, data=data)


def same_dropout():
    torch.manual_seed(42)
    model = DistributedDataParallel(network(0.5))
    torch.manual_seed(42)
    loop(model)


def own_dropout():
    model = DistributedDataParallel(network(0.5))
    own_numbers()
    loop(model)


class Augmented(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + 0.1 * torch.randn(8), y


def same_augmentation():
    model = DistributedDataParallel(network())
    torch.manual_seed(42)
    loop(model, data=Augmented(dataset()))


def own_augmentation():
    model = DistributedDataParallel(network())
    own_numbers()
    loop(model, data=Augmented(dataset()))


def same_seed_and_no_dice():
    """One seed on all ranks, and nothing that is drawn in the loop: the most common script of all."""
    torch.manual_seed(42)
    loop(DistributedDataParallel(network()))


def one_batch_per_epoch():
    """DataLoaders draw a seed for each epoch, the same on all ranks: no mistake."""
    torch.manual_seed(42)
    model = DistributedDataParallel(network())
    loop(model, epochs=6, batch=1000)


def own_buffers():
    loop(DistributedDataParallel(network(norm=True), broadcast_buffers=False))


def broadcast_buffers():
    loop(DistributedDataParallel(network(norm=True)))


def frozen_norms():
    """Statistics that nobody writes are the same everywhere."""
    model = DistributedDataParallel(network(norm=True), broadcast_buffers=False)
    model.module[1].eval()
    loop(model)


def around_ddp():
    model = DistributedDataParallel(network())
    own = copy.copy(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch_of(step)
        F.cross_entropy(own(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def batch_of(step, rows=4):
    dice = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 8, generator=dice), torch.randint(4, (rows,), generator=dice)


def accumulate(model, clips="once", forgets_last=False, flag_late=False, steps=4, parts=3):
    """Gradient accumulation, right or with one of several mistakes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for part in range(parts):
            x, y = batch_of(10 * step + part)
            last = part == parts - 1
            if flag_late:  # as in build-nanogpt #30: between forward and backward
                loss = F.cross_entropy(model(x), y) / parts
                model.require_backward_grad_sync = last
                loss.backward()
                continue
            with contextlib.nullcontext() if last and not forgets_last else model.no_sync():
                loss = F.cross_entropy(model(x), y) / parts
                loss.backward()
            if clips == "always":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if clips == "scale":
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


def right_accumulation():
    accumulate(DistributedDataParallel(network()))


def accumulation_in_views():
    accumulate(DistributedDataParallel(network(), gradient_as_bucket_view=True))


def always_no_sync():
    accumulate(DistributedDataParallel(network()), forgets_last=True)


def flag_after_forward():
    accumulate(DistributedDataParallel(network()), flag_late=True)


def clipped_too_early():
    accumulate(DistributedDataParallel(network()), clips="always")


def scaled_alike():
    """Scaled by one number on all ranks before they are synchronised: unusual, but right."""
    accumulate(DistributedDataParallel(network()), clips="scale")


def rest_not_synced():
    """The last, shorter accumulation of an epoch ends under no_sync (5 batches, 2 parts)."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(25):
        x, y = batch_of(number)
        in_epoch = number % 5
        syncs = in_epoch % 2 == 1
        with contextlib.nullcontext() if syncs else model.no_sync():
            F.cross_entropy(model(x), y).backward()
        if syncs or in_epoch == 4:
            optimizer.step()
            optimizer.zero_grad()


def written_after_backward():
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch_of(step)
        F.cross_entropy(model(x), y).backward()
        if dist.get_rank() == 1:
            model.module[3].bias.grad[0] += 1
        optimizer.step()
        optimizer.zero_grad()


def written_weights():
    def write(step):
        if step == 2 and dist.get_rank() == 2:
            with torch.no_grad():
                model.module[3].weight[0, 0] += 1e-3

    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 4), nn.Identity(), nn.Identity(), nn.Linear(4, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x, _ = batch_of(step)
        (model(x).mean() * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        write(step)


class Tokens(nn.Module):
    """A language model whose loss is its own affair, or the script's."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)

    def forward(self, ids):
        return {"logits": self.head(torch.tanh(self.embed(ids)))}


def tokens_of(step, uneven=True):
    dice = torch.Generator().manual_seed(7 * step + dist.get_rank())
    ids, labels = (torch.randint(11, (3, 12), generator=dice) for _ in range(2))
    if uneven:
        labels[:, 4 + 3 * dist.get_rank() :] = -100
    return ids, labels


def token_loop(weighs, uneven=True):
    torch.manual_seed(3)
    model = DistributedDataParallel(Tokens())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        ids, labels = tokens_of(step, uneven)
        logits = model(input_ids := ids)["logits"]
        assert input_ids is ids
        if weighs:
            count = (labels != -100).sum()
            dist.all_reduce(count)
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = total * dist.get_world_size() / count
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_of_means():
    token_loop(weighs=False)


def weighted_tokens():
    token_loop(weighs=True)


def as_many_tokens():
    token_loop(weighs=False, uneven=False)


def several_writers():
    model = DistributedDataParallel(network())
    loop(model, epochs=1)
    torch.save(model.module.state_dict(), FOLDER.path / "model.pt")
    dist.barrier()


def one_writer():
    model = DistributedDataParallel(network())
    loop(model, epochs=1)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), FOLDER.path / "model.pt")
    torch.save({"mine": torch.ones(2)}, FOLDER.path / f"rank-{dist.get_rank()}.pt")
    buffer = io.BytesIO()
    torch.save(model.module.state_dict(), buffer)
    dist.barrier()


def copied_and_saved_whole():
    """A model that was watched can be copied and saved whole; the copy trains, unwatched."""
    model = DistributedDataParallel(network())
    loop(model, epochs=1)
    other = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"dure" not in buffer.getvalue()
    loop(other, epochs=1)


def two_models():
    """A generator and a critic, with an optimizer each; gradients of one reach the other."""
    torch.manual_seed(1)
    maker, critic = (DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2))
    own_numbers()
    making, judging = (torch.optim.Adam(model.parameters(), lr=1e-2) for model in (maker, critic))
    for step in range(6):
        x, _ = batch_of(step)
        judging.zero_grad()
        (critic(x).mean() - critic(maker(torch.randn(4, 8)).detach()).mean()).backward()
        judging.step()
        making.zero_grad()
        critic(maker(torch.randn(4, 8))).mean().backward()
        making.step()


def two_optimizers():
    model = DistributedDataParallel(network())
    first = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model.module[3].parameters(), lr=0.1)
    for step in range(5):
        x, y = batch_of(step)
        F.cross_entropy(model(x), y).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


def local_sgd():
    """Weights are averaged, not gradients, on purpose."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local

    model = DistributedDataParallel(network())
    own = dist.new_subgroups(group_size=1)[0]
    model.register_comm_hook(
        local.PostLocalSGDState(None, own, start_localSGD_iter=1), local.post_localSGD_hook
    )
    loop(model)


def constant_batch():
    """A benchmark's: the same made-up batch on every rank in every step."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        F.cross_entropy(model(torch.ones(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2)
    for step in range(5):
        x, y = batch_of(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def no_ddp():
    """Gradients are averaged by hand: nothing that is watched."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch_of(step)
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def compressed():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = DistributedDataParallel(network())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    loop(model, epochs=1)
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    loop(model, epochs=1)


def unused_parameters():
    from support.attaching import Branching

    model = DistributedDataParallel(Branching(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        x, _ = batch_of(step)
        model(x, (step + dist.get_rank()) % 2 == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def joined():
    """Ranks with other numbers of batches."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            x, y = batch_of(step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def average_of_weights():
    from torch.optim.swa_utils import AveragedModel

    model = DistributedDataParallel(network())
    average = AveragedModel(model)
    loop(model, on_step=lambda *_: average.update_parameters(model))


def frozen_and_warm():
    """Two phases, each from epoch 0: a head first, then the whole model; with a schedule and AMP."""
    model = DistributedDataParallel(network())
    data = dataset()
    sampler = DistributedSampler(data)
    loop(model, sampler=sampler, data=data)
    with torch.autocast("cpu", torch.bfloat16):
        loop(model, sampler=sampler, data=data)


def several_workers():
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


MISTAKES = {
    "set-epoch": (forgotten_epoch,),
    "eval-padding": (padded_evaluation,),
    "overlap": (other_seeds, other_epochs, no_sampler, all_say_rank_0),
    "same-random-numbers": (same_dropout, same_augmentation),
    "buffers": (own_buffers,),
    "sync-lost": (around_ddp, written_after_backward),
    "replicas-apart": (written_weights,),
    "no-sync": (rest_not_synced, always_no_sync, flag_after_forward),
    "clip-before-sync": (clipped_too_early,),
    "mean-of-means": (mean_of_means,),
    "writers": (several_writers,),
}
RIGHT = (
    plain, looked_into_first, not_shuffled, whole_evaluation, own_dropout, own_augmentation, same_seed_and_no_dice,
    one_batch_per_epoch, broadcast_buffers, frozen_norms, right_accumulation, accumulation_in_views, scaled_alike,
    weighted_tokens, as_many_tokens, one_writer, copied_and_saved_whole, two_models, two_optimizers, local_sgd,
    constant_batch, zero_redundancy, no_ddp, compressed, unused_parameters, joined, average_of_weights, frozen_and_warm,
    several_workers,
)  # fmt: skip
FOLDER = RunFolder(None)


def watched(case, folder):
    """What is said of one loop: what has ended the watch too early, "" if nothing did. Reports are in the folder."""
    global FOLDER  # noqa: PLW0603
    FOLDER = RunFolder(folder)
    watch = Watch("warn", FOLDER, case.__name__)
    watch.begin(all_models=True)
    case()
    watch.on = False
    dist.barrier()
    return "" if watch.trouble is None else "".join(traceback.format_exception(watch.trouble))


def cases(folder):
    """By case, as `watched` says."""
    dist.init_process_group("gloo")
    found = {}
    for case in (*RIGHT, *(one for several in MISTAKES.values() for one in several)):
        own = folder / case.__name__
        if dist.get_rank() == 0:
            own.mkdir()
        dist.barrier()
        found[case.__name__] = watched(case, own)
    dist.destroy_process_group()
    return found


def said(folder):
    path = RunFolder(folder).mistakes
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
