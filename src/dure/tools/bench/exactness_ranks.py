"""A rank's part of the bench of exactness: five models, and each contender's step."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dure.base.errors import DureError
from dure.data.batches import Batch
from dure.device.fingerprint import fingerprint
from dure.observe.heartbeat import Phase
from dure.team import Team, start
from dure.tools.bench.exactness import DDP, DURE, PASSES, WHOLE, RankFigures, Size

BATCHES, CLASSES, SEED = 4, 8, 1
TOLERANCE = 1e-3

Parts = Sequence[tuple[Tensor, Tensor]]
Step = Callable[[int], object]


@dataclass(frozen=True)
class Task:
    """A model and what it is trained on."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    global_batch: int


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(32, 64, batch_first=True), nn.Linear(64, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.out(self.gru(points)[0][:, -1])
        return scores


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.out = nn.Linear(128, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.out(x.mean(1))
        return scores


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(32 * 9, CLASSES)),
    )


TASKS = {
    "cnn": Task(_cnn, lambda count: torch.randn(count, 3, 24, 24), 64),
    "transformer": Task(_Transformer, lambda count: torch.randint(0, 512, (count, 32)), 32),
    "mlp": Task(lambda: _mlp(512, 512, 512, CLASSES), lambda count: torch.randn(count, 512), 64),
    "gru": Task(_Recurrent, lambda count: torch.randn(count, 16, 32), 32),
    "tiny": Task(lambda: _mlp(16, 32, CLASSES), lambda count: torch.randn(count, 16), 32),
}


def run_rank(models: Sequence[str], ranks: int, size: Size) -> dict[str, RankFigures]:
    """The entry point of every rank."""
    with start(seed=SEED, shards=size.shards) as team:
        return {name: _measure(TASKS[name], team, ranks, size) for name in models}


def _measure(task: Task, team: Team, ranks: int, size: Size) -> RankFigures:
    torch.manual_seed(SEED)
    origin = task.model()
    dataset = TensorDataset(
        task.inputs(BATCHES * task.global_batch),
        torch.randint(0, CLASSES, (BATCHES * task.global_batch,)),
    )
    batches = list(team.batches(dataset, global_batch=task.global_batch, steps=BATCHES, shuffle=False))
    modules = {name: copy.deepcopy(origin) for name in (PASSES, DURE, WHOLE, *([DDP] if ranks > 1 else []))}
    steps = _steps(modules, team, batches, task.global_batch, ranks)
    _check_first_step(modules, steps, ranks)
    count = _steps_in(size.seconds, steps[PASSES], team)
    figures = RankFigures(sum(p.numel() for p in origin.parameters()), {name: [] for name in steps})
    order = list(steps)
    for number in range(size.rounds + 1):
        for name in (*order[number % len(order) :], *order[: number % len(order)]):
            team.heartbeat.beat(number, Phase.COMPUTE)
            team.group.sum(torch.zeros(1), "the start of a round")
            began = time.process_time()
            for step in range(count):
                steps[name](step)
            if number:  # the first round warms up
                figures.cpu_seconds[name].append((time.process_time() - began) / count)
    return figures


def _steps(
    modules: dict[str, nn.Module], team: Team, batches: list[Batch], global_batch: int, ranks: int
) -> dict[str, Step]:
    parts = [[part for shard in batch.shards for part in shard.parts] for batch in batches]
    whole = [[(torch.cat([x for x, _ in own]), torch.cat([y for _, y in own]))] for own in parts]
    optimizers = {name: torch.optim.AdamW(m.parameters(), fused=True) for name, m in modules.items()}

    def plain(name: str, model: nn.Module, data: Sequence[Parts], weight: float) -> Step:
        optimizer, no_context = optimizers[name], contextlib.nullcontext()

        def step(number: int) -> None:
            *first, last = data[number % BATCHES]
            for points, classes in first:
                with model.no_sync() if isinstance(model, DistributedDataParallel) else no_context:
                    backward(model, points, classes)
            backward(model, *last)
            optimizer.step()
            optimizer.zero_grad()

        def backward(model: nn.Module, points: Tensor, classes: Tensor) -> None:
            (F.cross_entropy(model(points), classes, reduction="sum") * weight).backward()

        return step

    steps = {
        PASSES: plain(PASSES, modules[PASSES], parts, ranks / global_batch),
        WHOLE: plain(WHOLE, modules[WHOLE], whole, ranks / global_batch),
    }
    if DDP in modules:
        model = DistributedDataParallel(modules[DDP], gradient_as_bucket_view=True)
        steps[DDP] = plain(DDP, model, parts, ranks / global_batch)
    replica, loss = team.replicate(modules[DURE]), F.cross_entropy
    steps[DURE] = lambda number: team.step(replica, optimizers[DURE], batches[number % BATCHES], loss)
    return steps


def _check_first_step(modules: dict[str, nn.Module], steps: dict[str, Step], ranks: int) -> None:
    """Whoever trains something else has figures that mean nothing. Without an exchange there is nothing to compare on
    several ranks."""
    before = {name: fingerprint(module.named_parameters()) for name, module in modules.items()}
    for step in steps.values():
        step(0)
    for name, module in modules.items():
        if fingerprint(module.named_parameters()) == before[name]:
            raise DureError(f"{name} has trained nothing")
        if ranks > 1 and name != DDP:
            continue
        pairs = zip(module.parameters(), modules[DURE].parameters(), strict=True)
        off = max(float((one - other).abs().max().detach()) for one, other in pairs)
        if off > TOLERANCE:
            raise DureError(f"after one step {name} is {off:.1e} from dure: they do not train the same")


def _steps_in(seconds: float, step: Step, team: Team) -> int:
    """How many steps last about so long; the same on all ranks."""
    began = time.process_time()
    for number in range(3):
        step(number)
    own = max(int(seconds * 3 / max(time.process_time() - began, 1e-6)), 1)
    return int(min(team.gather(own)))
