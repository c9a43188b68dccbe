"""A job whose optimizer, schedule, metrics and hooks are its own; `train_each` trains several in one set of ranks."""

import sys
from pathlib import Path

import torch

from dure.base.errors import DureError
from dure.base.files import write_whole
from dure.base.run_folder import RunFolder
from dure.config import load_job
from support.features import Points, with_dropout_and_batchnorm

HERE = Path(__file__)
JOB = f"""
name = "own"
[model]
factory = "{HERE}:with_dropout_and_batchnorm"
[data]
factory = "{HERE}:points"
args = {{ samples = 48 }}
global_batch = 16
[eval]
factory = "{HERE}:points"
args = {{ samples = 21, noise = false }}
metrics = ["accuracy"]
batch = 8
[train]
steps = 9
lr = 1e-2
seed = 4
[checkpoint]
every_steps = 4
"""
WARM_UP = {
    "train.schedule": "SequentialLR",
    "train.schedule_args": '{milestones = [4], schedulers = [{name = "LinearLR", start_factor = 0.1, total_iters = 4}, '
    '{name = "StepLR", step_size = 2}]}',
}
OWN = {
    "train.optimizer": f"{HERE}:make_optimizer",
    "train.optimizer_args": "{decay = 0.1}",
    "train.schedule": f"{HERE}:make_schedule",
    "train.schedule_args": "{every = 3}",
}
GATHERED = {
    "eval.gathered": f'["f1", "auroc", "confusion", "{HERE}:spread"]',
    "eval.every_steps": "2",
}
STOPPING = {"eval.every_steps": "2", "eval.stop_on": "loss", "eval.stop_after": "2", "train.lr": "0.5"}
HOOKED = {"hooks": f"{HERE}:Hooks", "eval.every_steps": "4"}
JOBS = {
    "warm-up": WARM_UP,
    "own optimizer and schedule": OWN,
    "gathered": GATHERED,
    "stopping": STOPPING,
    "hooked": HOOKED,
    "failing hook": {"hooks": f"{HERE}:Failing"},
}


def points(**args):
    return Points(**args)


def make_optimizer(model, lr, decay):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": rest, "lr": lr / 2}]
    return torch.optim.NAdam(groups, lr=lr)


class Halving:
    """A schedule that is not torch's."""

    def __init__(self, optimizer, every):
        self.optimizer, self.every, self.steps = optimizer, every, 0

    def step(self):
        self.steps += 1
        if self.steps % self.every == 0:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def make_schedule(optimizer, every):
    return Halving(optimizer, every)


def spread(outputs, targets):
    return {"rows": len(outputs), "std": outputs.std(), "last": targets[-1]}


class Hooks:
    """Writes down what it is told, on every rank."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda at: self.note(name, at)

    def note(self, name, at):
        self.told.append([name, at.steps, round(at.metrics.get("loss", -1.0), 6)])
        assert isinstance(at.model, torch.nn.Module)
        if name == "on_end":
            at.team.print("hooked:", self.told)
            # This file is loaded once more, as the job's.
            sys.modules["support.own_job"].TOLD[:] = self.told


TOLD = []


class Failing:
    def on_step(self, at):
        if at.steps == 2 and at.team.rank == at.team.topology.size - 1:
            raise ValueError("the last rank has had enough")


def job(folder):
    path = Path(folder) / "own.toml"
    write_whole(path, JOB.encode())  # all ranks write it, and read it
    return path


def train_one(name, folder, ranks, settings=None):
    """One job, in this process, as one of so many ranks."""
    from dure.train import run_rank

    place = Path(folder) / name.replace(" ", "-")
    loaded = load_job(job(folder), {**JOBS[name], **(settings or {})}, ranks=ranks, nodes="1")
    RunFolder(place).create()
    try:
        result = run_rank(loaded.to_json(), str(place))
    except DureError as error:
        return str(error)
    return {
        "sha": result.weights_sha256,
        "steps": result.steps,
        "metrics": result.metrics,
        "notes": [note for note in result.notes if "ended early" in note or "goes on" in note],
        "hooks": list(TOLD) if "hooks" in JOBS[name] else None,
    }


def train_each(names, folder, ranks):
    """Entry point of a rank."""
    return {name: train_one(name, folder, ranks) for name in names}


__all__ = ["with_dropout_and_batchnorm"]
