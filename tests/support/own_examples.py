"""The examples that are scripts, each trained by its own `train`, in one team."""

import importlib.util
from pathlib import Path

import torch

import dure
from dure.device.fingerprint import weights_sha256

SCRIPTS = {"gan": 20, "causal_lm": 12, "detection": 8, "reinforce": 10}
"""Steps: enough to differ, no more."""


def load(folder, name):
    spec = importlib.util.spec_from_file_location(f"example_script_{name}", Path(folder) / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_all(folder):
    """Entry point of a rank: the sha256 of all modules that an example returns, and whatever else it does."""
    found = {}
    with dure.start(seed=1) as team:
        for name, steps in SCRIPTS.items():
            torch.manual_seed(11)
            result = load(folder, name).train(team, steps)
            found[name] = [
                weights_sha256(one.module) if isinstance(one, torch.nn.Module) else one for one in result
            ]
    return found
