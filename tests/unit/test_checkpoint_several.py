"""Several models, optimizers and schedules, and a script's own values, in one state."""

import json
from collections import Counter, OrderedDict

import pytest
import torch

from dure.base.errors import CheckpointError, UsageError
from dure.checkpoint.capture import Capture
from dure.checkpoint.restore import restore
from dure.checkpoint.script_state import Extra, one_module, one_optimizer, one_schedule
from dure.checkpoint.state import Share, WholeState


class Run:
    """Two models, each with an optimizer and a schedule of its own kind, and values besides."""

    def __init__(self, seed, steps=0, **extra):
        torch.manual_seed(seed)
        self.models = [
            torch.nn.Linear(4, 3),
            torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)),
        ]
        self.optimizers = [
            torch.optim.AdamW(self.models[0].parameters(), lr=0.1 + seed),
            torch.optim.SGD(self.models[1].parameters(), lr=0.2, momentum=0.9),
        ]
        self.schedules = [torch.optim.lr_scheduler.StepLR(each, 2 + seed) for each in self.optimizers]
        self.average = torch.optim.swa_utils.AveragedModel(self.models[0])
        self.extra = {"average": self.average, "at": torch.zeros(2, dtype=torch.int64), **extra}
        for _ in range(steps):
            self.models[1](self.models[0](torch.randn(5, 4))).square().sum().backward()
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            self.average.update_parameters(self.models[0])
            self.extra["at"] += 1
        self.replica = (one_module(self.models), one_optimizer(self.optimizers), one_schedule(self.schedules))

    def state(self, parts=3):
        """As shares of several ranks, put together; through JSON, as a file has it."""
        takes = [
            Capture(*self.replica, Extra(self.extra)).take({"step": 2}, Share(at, parts))
            for at in range(parts)
        ]
        memory = torch.zeros(takes[0].table.nbytes, dtype=torch.uint8)
        for take in takes:
            take.copy_into(memory)
        return WholeState(json.loads(json.dumps(takes[0].facts)), takes[0].table, memory)

    def restore(self, state):
        restore(state, *self.replica, None, Extra(self.extra))

    def facts(self):
        """All that the next step depends on."""
        return [
            [model.state_dict() for model in self.models],
            [optimizer.state_dict() for optimizer in self.optimizers],
            [schedule.state_dict() for schedule in self.schedules],
            self.average.state_dict(),
            {name: value for name, value in self.extra.items() if name != "average"},
        ]


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def test_a_state_of_several_models_is_restored_bit_for_bit():
    values = {"best": 0.1, "counts": Counter("abca"), "pair": (1, [2, {"deep": torch.ones(2)}]), "none": None}
    trained = Run(1, steps=3, **values)
    other = Run(2, **dict.fromkeys(values))
    before = other.extra["at"]
    assert not same(trained.facts(), other.facts())
    other.restore(trained.state())
    assert same(trained.facts(), other.facts())
    assert other.extra["at"] is before, "a tensor is written in place: the script holds it"
    for run in (trained, other):  # and it goes on the same way
        torch.manual_seed(9)
        run.models[1](run.models[0](torch.randn(5, 4))).square().sum().backward()
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert same([m.state_dict() for m in trained.models], [m.state_dict() for m in other.models])


def test_what_a_script_adds_while_it_runs_comes_back_too():
    trained, other = Run(1, steps=1), Run(1)
    trained.extra["later"] = OrderedDict(step=3, tensor=torch.arange(3))
    other.restore(trained.state())
    assert same(other.extra["later"], {"step": 3, "tensor": torch.arange(3)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: run.extra.update(more=1), "has no more in extra"),
        (lambda run: run.extra.update(at=torch.zeros(3)), "extra at is not a tensor like the script's"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, words):
    trained, other = Run(1, steps=1), Run(1)
    change(other)
    before = other.models[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=words):
        other.restore(trained.state())
    assert torch.equal(other.models[0].weight, before)


def test_other_optimizers_in_other_places_are_refused():
    trained, other = Run(1, steps=1), Run(1)
    other.replica = (other.replica[0], one_optimizer(other.optimizers[::-1]), other.replica[2])
    with pytest.raises(CheckpointError, match=r"its optimizer is AdamW\+SGD .* the job's is SGD\+AdamW"):
        other.restore(trained.state())


def test_what_cannot_be_saved_is_refused_before_anything_is_trained():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="extra best is a complex"):
        Extra({"best": 1j})
    with pytest.raises(CheckpointError, match=r"has a key '\(tensor\)'"):
        Extra({"best": {"(tensor)": 1}})
    with pytest.raises(UsageError, match="use letters, digits and _"):
        one_module({"a.b": model})
    with pytest.raises(UsageError, match="torch uses itself"):
        one_module({"training": model})
    with pytest.raises(UsageError, match="model is a SGD"):
        one_module(optimizer)
    with pytest.raises(UsageError, match="two optimizers have the same parameter"):
        one_optimizer([optimizer, torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(UsageError, match="without state_dict"):
        one_schedule({"a": object()})
