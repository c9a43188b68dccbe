"""Random models from a grammar, as jobs: layers × dtypes × frozen × tied × unused × buffers × modes.

A model is a list of words, so that it can be written into a job, drawn by hypothesis and read in a failure.
"""

import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dure.base.errors import DureError
from dure.config import load_job
from dure.train import run_rank

WIDTH, CLASSES = 12, 4


class Cast(nn.Module):
    """An inner layer of another dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.inner, self.dtype = nn.Linear(WIDTH, WIDTH).to(dtype), dtype

    def forward(self, x):
        return torch.tanh(self.inner(x.to(self.dtype)).to(x.dtype))


class Branches(nn.Module):
    """Layers that only some samples take; the last one none ever does."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        way = (x[:, 0] * 5).long().abs() % 3
        out = x
        for at, layer in enumerate(self.ways):
            taken = (way == at).nonzero()[:, 0]
            if len(taken):
                out = out.index_add(0, taken, torch.tanh(layer(x[taken])).to(out.dtype))
        return out


class Gone(nn.Module):
    """A layer that small batches leave out."""

    def __init__(self):
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.rare(x)) if bool((x[:, 1] > 1.2).any()) else x


class Running(nn.Module):
    """A buffer that every forward pass writes, and one that it only reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x - self.mean) * self.scale


class Rotated(nn.Module):
    """A weight that is not contiguous, a scalar, and a weight without elements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x):
        return torch.tanh(x @ self.weight) * self.scale + self.nothing.sum()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(4, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.cell(x.view(len(x), -1, 4))[0][:, -1]


class Wide(nn.Module):
    """Large enough to be cut by a sharded optimizer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 523), nn.Linear(523, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def frozen():
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)
    return layer


def frozen_in_eval_mode():
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)).requires_grad_(
        False
    )
    return layer.eval()


class Never(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))

    def forward(self, x):
        return x


WORDS = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "wide": Wide,
    "dropout": lambda: nn.Dropout(0.3),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "bf16": lambda: Cast(torch.bfloat16),
    "fp16": lambda: Cast(torch.float16),
    "fp64": lambda: Cast(torch.float64),
    "branches": Branches,
    "gone": Gone,
    "running": Running,
    "rotated": Rotated,
    "recurrent": Recurrent,
    "frozen": frozen,
    "frozen, in eval mode": frozen_in_eval_mode,
    "never used": Never,
}


class Net(nn.Module):
    """The words' layers in order; "again" is the layer before once more, with the same weights."""

    def __init__(self, words, folder):
        super().__init__()
        self.layers = nn.ModuleList()
        for word in words:
            self.layers.append(
                self.layers[-1] if word == "again" and self.layers else WORDS.get(word, frozen)()
            )
        self.out = nn.Linear(WIDTH, CLASSES)
        self.folder, self.calls = folder, 0

    def forward(self, x):
        self._die_if_due()
        for layer in self.layers:
            x = layer(x)
        return self.out(x)

    def _die_if_due(self):
        """Once, where a file says so: rank and call."""
        self.calls += 1
        if self.folder is not None:
            try:
                rank, call = json.loads(Path(self.folder, "kill").read_text())
                if rank == int(os.environ.get("RANK", "0")) and call == self.calls:
                    Path(self.folder, "kill").rename(Path(self.folder, "killed"))
                    os.kill(os.getpid(), signal.SIGKILL)
            except OSError:
                pass


def model(words, folder=None):
    return Net(words, folder)


def data(samples):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(samples, WIDTH, generator=generator)
    return TensorDataset(x, (x @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(1))


JOB = """
[model]
factory = "support.grammar:model"
[data]
factory = "support.grammar:data"
global_batch = 24
[train]
steps = 14
[team]
shards = 8
hang_seconds = 120
[checkpoint]
memory_every = 3
every_steps = 5
"""


def job_text(case, ranks, folder, *, kill=False):
    """A drawn case as the job that ranks are handed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "grammar.toml").write_text(JOB)
    where = f', folder = "{folder}"' if kill else ""
    settings = {
        "model.args": f"{{ words = {json.dumps(case['words'])}{where} }}",
        "data.args": f"{{ samples = {case['samples']} }}",
        "data.split": case["split"],
        "train.optimizer": case["optimizer"][0],
        "train.optimizer_args": case["optimizer"][1],
        "train.accumulate": str(case["accumulate"]),
        "train.shard_optimizer": str(case["sharded"]).lower(),
        "train.precision": case["precision"],
        "reduce.wire": case["wire"],
        **({"train.clip_norm": "0.5"} if case["clips"] else {}),
    }
    return load_job(folder / "grammar.toml", settings, ranks=ranks, nodes="1").to_json()


def train_each(texts, folder):
    """Entry point: what each job comes to, the sha256 of its weights or the kind of its refusal."""
    found = []
    for at, text in enumerate(texts):
        try:
            found.append(run_rank(text, str(Path(folder, str(at)))).weights_sha256)
        except DureError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
