"""A small run that saves, for tests of checkpoints; without ranks."""

import torch

from dure.checkpoint.capture import Capture
from dure.checkpoint.find import newest_state
from dure.checkpoint.state import Share
from dure.checkpoint.writer import CheckpointWriter, Retention
from dure.comm.group import Group

ALONE = Group(None, 0, 1)


class SmallRun:
    """A model of some kilobytes whose weights tell the step they are of."""

    def __init__(self, store, *, keep=2, rows=64, line="line"):
        self.store = store
        self.line = line
        self.module = torch.nn.Linear(33, rows)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        self.outcomes = []
        self.writer = CheckpointWriter(store, ALONE, Retention(keep), lambda: None, self.outcomes.append)

    def save(self, step, **facts):
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(step)
                parameter.grad = torch.full_like(parameter, step)
        told = {"step": step, "line": self.line, "saved_at": "", "recipe_words": {}, **facts}
        state = Capture(self.module, self.optimizer, None).take(told, Share(0, 1))
        self.writer.begin(state)
        assert self.writer.wait()
        return self.outcomes[-1]


def newest(store, accepts=lambda manifest: None):
    """The newest state that can be trusted, whether its weights are that step's, and what was told."""
    told = []
    whole = newest_state(store, ALONE, ALONE, accepts, told.append)
    if whole is None:
        return None, told
    step = whole.facts["step"]
    for name in ("model/weight", "model/bias"):
        assert bool((whole.elements(name) == step).all()), f"a partial state of step {step} was loaded"
    return step, told
