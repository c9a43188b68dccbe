"""Jobs that once gave other bits on other numbers of ranks; `train_each` trains several in one set of ranks."""

from pathlib import Path

from dure.config import load_job
from dure.train import run_rank

HERE = Path(__file__).parent
JOB = """
[model]
factory = "models.py:plain"
[data]
factory = "samples.py:data"
global_batch = 37
[train]
epochs = 1
lr = 1e-2
[team]
shards = 8
hang_seconds = 300
"""
SHARDED = {"train.shard_optimizer": "true"}
MOMENTUM = {
    "train.optimizer": "SGD",
    "train.optimizer_args": "{momentum = 0.9, weight_decay = 0.01}",
    "train.epochs": "2",  # three samples an epoch use the layer; its momentum shows in the steps after them
}
MICRO = {
    "model.factory": "models.py:Extra",
    "data.args": "{n = 592, small = [578, 586]}",
    "data.shuffle": "false",
    "train.accumulate": "2",
}
FROZEN = {"model.factory": "models.py:frozen_backbone", "train.epochs": "2"}
"""Two epochs: what an evaluation changes shows in the steps after it."""
JOBS = {
    "bf16": {"model.args": '{dtype = "bfloat16"}'},
    "bf16, sharded": {"model.args": '{dtype = "bfloat16"}', **SHARDED},
    "fp16, sharded": {"model.args": '{dtype = "float16"}', **SHARDED},
    "fp32": {},
    "fp32, sharded": SHARDED,
    "fp64 and bf16 of one size": {"model.factory": "models.py:Mixed"},
    "fp64 and bf16 of one size, sharded": {"model.factory": "models.py:Mixed", **SHARDED},
    "left out by the last micro-batch": MICRO,
    "left out by the last micro-batch, sharded": {**MICRO, **SHARDED},
    "first used later, momentum": {"model.factory": "models.py:Branch", **MOMENTUM},
    "first used later, momentum, sharded": {"model.factory": "models.py:Branch", **MOMENTUM, **SHARDED},
    "experts": {"model.factory": "models.py:Experts", "train.accumulate": "3"},
    "experts, sharded": {"model.factory": "models.py:Experts", "train.accumulate": "3", **SHARDED},
    "a backbone in eval mode": FROZEN,
    "a backbone in eval mode, judged each epoch": {
        **FROZEN,
        "eval.factory": "samples.py:data",
        "eval.args": "{n = 100}",
        "eval.metrics": '["accuracy"]',
        "eval.every_epochs": "1",
    },
    "batch norm, the last batch left out": {
        "model.factory": "models.py:with_batch_norm",
        "data.args": "{n = 310}",
        "data.drop_last": "true",
    },
}
SAME = [
    ("bf16", "bf16, sharded"),
    ("fp32", "fp32, sharded"),
    ("fp64 and bf16 of one size", "fp64 and bf16 of one size, sharded"),
    ("left out by the last micro-batch", "left out by the last micro-batch, sharded"),
    ("first used later, momentum", "first used later, momentum, sharded"),
    ("experts", "experts, sharded"),
    ("a backbone in eval mode", "a backbone in eval mode, judged each epoch"),
]
"""Settings that never change a bit."""


def job_text(folder, settings, ranks):
    """The job as it is handed to a rank."""
    path = Path(folder) / "found.toml"
    if not path.exists():
        path.write_text(
            JOB.replace('"models.py', f'"{HERE}/models.py').replace('"samples.py', f'"{HERE}/samples.py')
        )
    named = {
        key: f"{HERE}/{value}" if value.startswith(("models.py", "samples.py")) else value
        for key, value in settings.items()
    }
    return load_job(path, named, ranks=ranks, nodes="1").to_json()


def train_each(texts, folder):
    """Entry point: the sha256 of the weights that each job ends with."""
    return {
        name: run_rank(text, str(Path(folder, str(at)))).weights_sha256
        for at, (name, text) in enumerate(texts)
    }
