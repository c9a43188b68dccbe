"""The tiny transformer's data, read as slowly as the environment says: for tests that must meet a run in its steps."""

import importlib.util
import os
import time
from pathlib import Path

from torch.utils.data import Dataset

_PATH = Path(__file__).parents[2] / "examples" / "tiny_transformer.py"


class Slow(Dataset):
    def __init__(self, inner):
        self.inner = inner
        # Of several, one for each time that Slurm has queued the job again; the last is for all that follow.
        by_attempt = os.environ.get("SLOW_SAMPLES", "0").split(",")
        attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.seconds = float(by_attempt[min(attempt, len(by_attempt) - 1)])

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, at):
        time.sleep(self.seconds)
        return self.inner[at]


def counting(**arguments):
    spec = importlib.util.spec_from_file_location("tiny_transformer_data", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Slow(module.counting(**arguments))
