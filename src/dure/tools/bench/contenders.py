"""The contenders of the step bench, each set up the way its own documentation shows.

All of them live in the same processes. Each has a copy of the same model and an optimizer of its own, and
trains on the same samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dure.base.errors import DureError
from dure.data.batches import Batch
from dure.step.loss import as_sum
from dure.team import Team, attach
from dure.tools.bench.workload import ATTACHED, BACKEND, DDP, FINER, LIMIT, SHARDED, STATIC, TUNED, Workload

Sequences = tuple[Tensor, Tensor]
"""Tokens, and the ones that follow them."""


class Transformer(nn.Module):
    """A causal language model without dropout, so that contenders can be compared with each other."""

    def __init__(self, load: Workload) -> None:
        super().__init__()
        self.token = nn.Embedding(load.vocabulary, load.width)
        self.place = nn.Embedding(load.seq, load.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                load.width, load.heads, 4 * load.width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(load.layers)
        )
        self.norm = nn.LayerNorm(load.width)
        self.out = nn.Linear(load.width, load.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The scores of what comes next, at every place."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.token(tokens) + self.place(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        scores: Tensor = self.out(self.norm(x))
        return scores


def sequences(load: Workload) -> TensorDataset:
    """Random tokens, all in memory."""
    dice = torch.Generator().manual_seed(load.seed)
    tokens = torch.randint(load.vocabulary, (load.batches * load.global_batch, load.seq + 1), generator=dice)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@dataclass(frozen=True)
class Contender:
    """One way to train, cut where the gradients can be looked at."""

    module: nn.Module
    """The plain model inside, whatever it is wrapped in."""
    forward_backward: Callable[[int], object]
    """Compute the gradients of the n-th global batch, averaged over the ranks (the limit's are not)."""
    update: Callable[[], object]
    """Apply them, and make ready for the next."""

    def step(self, number: int) -> None:
        """One whole step."""
        self.forward_backward(number)
        self.update()


def limit(module: nn.Module, load: Workload, data: Sequence[Sequences]) -> Contender:
    """No synchronisation at all: what nobody can beat."""
    return _plain(module, module, _optimizer(module, load), torch.Tensor.backward, data)


def ddp(module: nn.Module, load: Workload, data: Sequence[Sequences]) -> Contender:
    """Plain DistributedDataParallel over Gloo, as PyTorch's tutorial has it."""
    model = DistributedDataParallel(module)
    return _plain(module, model, _optimizer(model, load), torch.Tensor.backward, data)


def ddp_static(module: nn.Module, load: Workload, data: Sequence[Sequences]) -> Contender:
    """The same, with the two options that save it copies and searches."""
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True)
    return _plain(module, model, _optimizer(model, load), torch.Tensor.backward, data)


def ddp_tuned(module: nn.Module, load: Workload, data: Sequence[Sequences]) -> Contender:
    """The same, with buckets of the size that `load` says."""
    model = DistributedDataParallel(
        module, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=load.bucket_cap_mb
    )
    return _plain(module, model, _optimizer(model, load), torch.Tensor.backward, data)


def dure_backend(module: nn.Module, load: Workload, data: Sequence[Sequences]) -> Contender:
    """The same as `ddp_static`, on a process group of the backend dure."""
    group = torch.distributed.new_group(backend="dure")
    model = DistributedDataParallel(
        module, process_group=group, gradient_as_bucket_view=True, static_graph=True
    )
    return _plain(module, model, _optimizer(model, load), torch.Tensor.backward, data)


def dure_attach(module: nn.Module, load: Workload, data: Sequence[Sequences]) -> Contender:
    """The same as `ddp_static`, attached; replicas are compared every 100 steps, as by default."""
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True)
    attach(model)
    return _plain(module, model, _optimizer(model, load), torch.Tensor.backward, data)


def accelerate(module: nn.Module, load: Workload, data: Sequence[Sequences]) -> Contender:
    """Hugging Face Accelerate; it finds torchrun's variables and the process group that is there."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(module, _optimizer(module, load))
    return _plain(module, _must_be_ddp("accelerate", model), optimizer, accelerator.backward, data)


def fabric(module: nn.Module, load: Workload, data: Sequence[Sequences]) -> Contender:
    """Lightning Fabric; it finds torchrun's variables and the process group that is there."""
    from lightning_fabric import Fabric

    ranks = torch.distributed.get_world_size()
    lightning = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    lightning.launch()
    model, optimizer = lightning.setup(module, _optimizer(module, load))
    return _plain(module, _must_be_ddp("fabric", model), optimizer, lightning.backward, data)


PEERS: dict[str, Callable[[nn.Module, Workload, Sequence[Sequences]], Contender]] = {
    LIMIT: limit,
    DDP: ddp,
    STATIC: ddp_static,
    TUNED: ddp_tuned,
    BACKEND: dure_backend,
    ATTACHED: dure_attach,
    "accelerate": accelerate,
    "fabric": fabric,
}


def dure(
    module: nn.Module, load: Workload, team: Team, data: Sequence[Batch], *, shard_optimizer: bool
) -> Contender:
    """Ours, as a script uses it; `step` is these two halves."""
    model, loss = team.replicate(module), as_sum(F.cross_entropy)
    optimizer = _optimizer(model, load)
    if shard_optimizer:
        team.shard_optimizer(model, optimizer, share_weights=True, own_gradients=True)
    return Contender(
        module,
        lambda number: team.forward_backward(model, data[number % len(data)], loss),
        lambda: team.update(model, optimizer),
    )


def make_contenders(names: Sequence[str], load: Workload, team: Team, finer: Team) -> dict[str, Contender]:
    """All contenders by name, from one model. `finer` is the team with `load.shards` shards."""
    torch.manual_seed(load.seed)
    origin = Transformer(load)
    dataset = sequences(load)

    def batches_of(team: Team) -> list[Batch]:
        size, count = load.global_batch, load.batches
        return list(team.batches(dataset, global_batch=size, steps=count, shuffle=False))

    whole = [_whole(batch) for batch in batches_of(team)]
    contenders = {}
    for name in names:
        module = copy.deepcopy(origin)
        if name in PEERS:
            contenders[name] = PEERS[name](module, load, whole)
        else:
            own = finer if name == FINER else team
            contenders[name] = dure(module, load, own, batches_of(own), shard_optimizer=name == SHARDED)
    return contenders


def _plain(
    module: nn.Module,
    model: nn.Module,
    optimizer: Any,  # torch's own, or a library's wrapper around it
    backward: Callable[[Tensor], object],
    data: Sequence[Sequences],
) -> Contender:
    """The loop body that all but us share: the rank's samples at once, and a mean loss."""

    def forward_backward(number: int) -> None:
        tokens, following = data[number % len(data)]
        backward(F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()))

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Contender(module, forward_backward, update)


def _optimizer(module: nn.Module, load: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=load.lr, fused=True)


def _must_be_ddp(name: str, model: nn.Module) -> nn.Module:
    if not any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise DureError(
            f"{name} made a {type(model).__name__} without DistributedDataParallel: nothing to compare"
        )
    return model


def _whole(batch: Batch) -> Sequences:
    """This rank's samples of a global batch, in one piece."""
    parts = [part for shard in batch.shards for part in shard.parts]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([following for _, following in parts])
