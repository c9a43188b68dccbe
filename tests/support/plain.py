"""What a plain PyTorch user writes, to be compared with."""

from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import dure
from support.features import Points, plain


def all_three(folder):
    """Entry point of a rank: all comparisons, by name."""
    with ExitStack() as teams:  # which stay until the end, for leaving one ends them all

        def start(**settings):
            return teams.enter_context(dure.start(**settings))

        comparisons = (one_sgd_step, document_averages, three_weights)
        return {compare.__name__: compare(start, folder) for compare in comparisons}


def one_sgd_step(start, _folder):
    """The weights after one step of dure and of plain DDP with its DistributedSampler, on the same rank."""
    data = Points(samples=64, noise=False)
    team = start(seed=1, shards=4)
    ours = team.replicate(plain())
    start = {name: value.clone() for name, value in ours.module.state_dict().items()}
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for batch in team.batches(data, global_batch=64, steps=1, shuffle=False):
        team.step(ours, optimizer, batch, F.cross_entropy)

    theirs = plain()
    theirs.load_state_dict(start)
    model = DistributedDataParallel(theirs)
    sampler = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in DataLoader(data, batch_size=16, sampler=sampler):
        F.cross_entropy(model(points), labels).backward()
        optimizer.step()
    mine = list(ours.module.parameters())
    moved = max(float((a - b).detach().abs().max()) for a, b in zip(mine, start.values(), strict=True))
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(mine, theirs.parameters(), strict=True))
    return (
        moved,
        apart,
        [batch.ids for batch in team.batches(data, global_batch=64, steps=1, shuffle=False)],
    )


def document_averages(start, _folder):
    """Document 000: four ranks' gradients, averaged by the exchange."""
    gradients = torch.tensor([[0.8, 0.2, 0.5], [0.6, 0.4, 0.3], [0.7, 0.3, 0.4], [0.5, 0.1, 0.6]])

    class Gradients(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return gradients[index], 0

    class Weights(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.zeros(3))

        def forward(self, gradient):
            return gradient @ self.weights

    team = start(shards=4)
    model = team.replicate(Weights())
    for batch in team.batches(Gradients(), global_batch=4, steps=1, shuffle=False):
        team.forward_backward(model, batch, lambda output, _: (output.sum(), float(len(output))))
    return model.module.weights.grad.tolist()


def three_weights(start, folder):
    """Document 001's weights on this rank, from a run of examples/three_weights.toml."""
    from dure.base.run_folder import RunFolder
    from dure.config import load_job
    from dure.observe.events import Recorder
    from dure.train import Run

    loaded = load_job(Path(__file__).parents[2] / "examples" / "three_weights.toml")
    team = start(seed=42, shards=4)
    run = Run(loaded, RunFolder(Path(folder)), team, Recorder(None), {})
    before = run.model.module.weights.tolist()
    run.train()
    return before, run.model.module.weights.tolist()
