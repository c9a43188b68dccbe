"""The sections of a job file that say what to train, on what, how, and by whom."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dure.base.say import printable
from dure.config.cluster import Cluster, Kubernetes, Ray, Slurm
from dure.config.limits import (
    LARGEST_SEED,
    LONGEST_SECONDS,
    MOST_SHARDS,
    MOST_THREADS,
    Count,
    CountOrNone,
    Ranks,
    Rate,
    Seconds,
    Threads,
)
from dure.config.section import Section

DeviceName = Literal["auto", "cpu", "cuda"]
"""What ranks compute on; `auto` is whatever accelerator all of them have, else the CPU."""
Factory = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][\w.]*$")]
"""`package.module:callable` or `path/file.py:callable`; a path is relative to the job file."""


class Model(Section):
    """What is trained."""

    factory: Factory | None = None
    """Called in every rank; returns a torch.nn.Module. May be left out when `weights` is a Hugging Face folder."""
    args: dict[str, Any] = Field(default={})
    """Keyword arguments of the factory, `{storage}` in a string standing for the job's storage; without a factory what
    `from_pretrained` takes, and `auto`, the class's name."""
    weights: str | None = None
    """Pretrained weights, a file or a Hugging Face folder: a path in the job's storage, an absolute one, or s3://…;
    without, the weights come from the seed and no storage is read."""
    load: Literal["slices", "every-rank", "rank0"] = "slices"
    """Who reads the weights: every rank its part, every rank everything, or rank 0 for all. Never changes a bit."""
    strict: bool = True
    """false: tensors that are missing in the file keep their first values, and those without a place are left out."""
    find_unused: bool | Literal["auto"] = "auto"
    """Whether a model whose first batch leaves parameters unused is accepted: `auto` says how many, `false` refuses it.
    Parameters that shards leave out later are always handled."""

    @model_validator(mode="after")
    def _something_to_build(self) -> Model:
        if self.factory is None and self.weights is None:
            raise ValueError(
                "model.factory is missing; give one, or model.weights with a Hugging Face folder, whose config.json "
                "says what to build"
            )
        return self


class Data(Section):
    """What it is trained on."""

    factory: Factory
    """Called in every rank; returns a map-style dataset of (input, target) samples."""
    args: dict[str, Any] = Field(default={})
    """Keyword arguments of the factory. `{storage}` in a string stands for the job's storage folder."""
    global_batch: Count
    """Samples in one optimizer step, over all ranks."""
    shuffle: bool = True
    """A new order each epoch, drawn from (seed, epoch)."""
    split: Literal["interleaved", "blocks"] = "interleaved"
    """How samples go to shards: one by one in turn (0, 4, 8, …), or in runs (1-100, 101-200, …)."""
    drop_last: bool = False
    """An epoch ends with its last full batch; the few samples after it take no part in that epoch."""
    workers: Annotated[int, Field(ge=0, le=MOST_THREADS)] = 0
    """Processes a rank that read samples ahead of the step. Never changes a bit."""
    collate: Factory | None = None
    """Joins samples into a batch; torch's default_collate when not given."""


class Eval(Section):
    """What it is judged on; without a factory there is no evaluation."""

    factory: Factory | None = None
    """Called in every rank; returns a map-style dataset of (input, target) samples."""
    args: dict[str, Any] = Field(default={})
    """Keyword arguments of the factory."""
    metrics: tuple[str, ...] = ()
    """`accuracy`, or callables `(output, target) -> (sum, count)`. The loss is always there."""
    batch: Count | None = None
    """Samples in one forward pass over all ranks; `data.global_batch` when not given."""
    gathered: tuple[str, ...] = ()
    """Metrics that are no means, of all samples' outputs at once: `f1`, `auroc`, `confusion`, or callables
    `(outputs, targets) -> number, dict or list of numbers`."""
    every_epochs: CountOrNone = 0
    """Evaluate after every so many epochs; 0: once, at the end."""
    every_steps: CountOrNone = 0
    """Evaluate after every so many steps, too; 0: not by steps."""
    stop_on: str | None = None
    """A metric (`loss` too): the run ends, as if it were complete, when it does not get better any more."""
    stop_after: Count = 3
    """Evaluations in a row, none of them better than the best before, after which it ends."""
    stop_mode: Literal["min", "max"] = "min"
    """Whether less or more of `stop_on` is better."""

    @model_validator(mode="after")
    def _something_to_stop_on(self) -> Eval:
        if self.stop_on is None:
            return self
        named = [name.partition(":")[2] or name for name in self.gathered]
        known = ["loss", *self.metrics, *named]
        if self.stop_on not in known and self.stop_on.partition(".")[0] not in named:
            raise ValueError(
                f"eval.stop_on is {printable(repr(self.stop_on), 62)}, which is no metric; there are "
                f"{printable(', '.join(known), 300)}"
            )
        if self.factory is None or not (self.every_epochs or self.every_steps):
            raise ValueError(
                "eval.stop_on needs evaluations to look at: give eval.factory, and eval.every_epochs or "
                "eval.every_steps"
            )
        return self


class ParamGroup(Section):
    """Other optimizer settings for some parameters."""

    match: str
    """A shell-style pattern of parameter names, such as `*.bias`; the first group that matches counts."""
    args: dict[str, Any]
    """What differs for them, such as `{ weight_decay = 0.0 }`."""


class Train(Section):
    """How it is trained."""

    loss: str = "cross_entropy"
    """`cross_entropy`, `mse`, or a callable that returns unreduced losses, or (sum, count)."""
    optimizer: str = "AdamW"
    """A class of torch.optim, by name, or a factory, called with the model, `lr` and `optimizer_args`."""
    lr: Rate = 1e-3
    """Learning rate."""
    optimizer_args: dict[str, Any] = Field(default={})
    """Further keyword arguments of the optimizer. Fused kernels are used where torch has them."""
    groups: tuple[ParamGroup, ...] = ()
    """Parameter groups with settings of their own."""
    shard_optimizer: bool = False
    """Each rank of a node updates its part of the weights and holds the optimizer's state for that part alone,
    instead of all ranks doing the same. Elementwise optimizers only. Never changes a bit."""
    schedule: str | None = None
    """A class of torch.optim.lr_scheduler, by name, or a factory, called with the optimizer and `schedule_args`;
    stepped once per step."""
    schedule_args: dict[str, Any] = Field(default={})
    """Keyword arguments of the schedule. Of `SequentialLR` and `ChainedScheduler`, `schedulers` is a list of tables,
    each with the `name` of a schedule and its arguments."""
    epochs: Count | None = None
    """Passes over the data. Give this or `steps`."""
    steps: Count | None = None
    """Optimizer steps. Give this or `epochs`."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    """The one seed of the run, below 2**63: weights, order, dropout and augmentation all come from it."""
    accumulate: Count = 1
    """Parts that each shard is computed in, to save memory."""
    clip_norm: Rate | None = None
    """Gradients are scaled down so that their norm is at most this."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, taken after every update, such as 0.999. Evaluations are
    then of the average, checkpoints hold it too, and `dure export --average` writes it. Never changes the weights."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16`: the forward pass under autocast; weights and gradients stay as they are."""
    prove_every: CountOrNone | Literal["auto"] = "auto"
    """Steps between two proofs that all replicas are the same bits. `auto`: as often as takes 0.5 % of the time, every
    1000 steps at the rarest; 0: only at the end."""
    audit: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of steps in which another rank computes one shard again, drawn at random, and compares the gradients' bits
    before they met others; 0: none. Never changes a bit."""
    on_corruption: Literal["stop", "exclude", "repeat"] = "stop"
    """When a rank was found to compute wrongly, the step is repeated. Then the run saves and ends (exit code 3), or
    goes on: without that rank as far as `--ranks 2:8` lets it (on several nodes without its node), or with it."""
    receipt_every: CountOrNone = 100
    """Steps between two hashes of all weights and optimizer state in the run's receipt; 0: only at the end. Those of
    checkpoints are always recorded."""

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if (self.epochs is None) == (self.steps is None):
            given = "neither is given" if self.epochs is None else "both are given"
            raise ValueError(f"give train.epochs or train.steps, one of them; {given}")
        if "lr" in self.optimizer_args:
            raise ValueError("the learning rate is train.lr; take lr out of train.optimizer_args")
        if ":" in self.optimizer and self.groups:
            raise ValueError(
                f"train.groups are for optimizers of torch, and {self.optimizer} makes its own; make the groups there"
            )
        return self


class TeamSection(Section):
    """Who trains it."""

    ranks: Ranks = 2
    """Processes that train together on each node, at most 1024. Never changes a bit."""
    min_ranks: Ranks | None = None
    """The run goes on with fewer ranks on a node, down to so many, when some of them cannot be kept alive; as
    `--ranks 2:8` says it. Without it, always `ranks`."""
    shards: Annotated[int, Field(ge=1, le=MOST_SHARDS)] = 8
    """Fixed parts of every global batch, at most 65536; the bits depend on this, never on the ranks."""
    threads: Threads = 1
    """Threads a rank computes with, at most 1024. Part of the recipe: another number gives other bits."""
    arithmetic: Literal["native", "portable"] = "native"
    """`portable`: kernels that give the same bits on x86-64 CPUs with AVX2 of all vendors; slower. `native`: this CPU's
    fastest; nodes whose CPUs compute other bits are refused, and so is going on with such a run."""
    device: DeviceName = "auto"
    """Where the model lives; `auto` takes CUDA where there is a device for every local rank."""
    sync: bool = True
    """false: no exchange; every rank trains a model of its own, and the run says how far apart they are."""
    hang_seconds: Seconds = 120.0
    """When no rank moves for so long, the team is hung; the run says who waits for whom."""
    stop_seconds: Seconds = 100.0
    """How long a run that was asked to stop (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) may take to finish its step and save;
    then its ranks are ended, and it goes on from its newest checkpoint the next time."""
    max_restarts: CountOrNone = 3
    """How often a team whose machine failed it (a rank killed, crashed, out of memory, hung) is started again
    without getting to a further step; then the run ends with the first cause. 0: at once."""

    @model_validator(mode="after")
    def _a_shard_for_each(self) -> TeamSection:
        if self.min_ranks is not None and self.min_ranks > self.ranks:
            raise ValueError(
                f"team.min_ranks is {self.min_ranks}, more than team.ranks, which is {self.ranks}; turn them round"
            )
        if self.ranks > self.shards:
            raise ValueError(
                f"team.ranks is {self.ranks}, but there are only {self.shards} shards and each rank needs one; "
                f"use at most {self.shards} ranks, or set team.shards to {self.ranks} or more (other bits)"
            )
        return self


class Reduce(Section):
    """How gradients meet."""

    wire: Literal["fp32", "bf16"] = "fp32"
    """`bf16`: what crosses between two nodes is rounded, and half as long. Part of the recipe: other bits."""
    transport: Literal["auto", "gloo"] = "auto"
    """`auto`: shared memory within a node, where it can be had; `gloo`: never. The same bits."""


class Checkpoint(Section):
    """What is saved, and how often. A run that was stopped or killed goes on from the newest."""

    folder: str = "checkpoints"
    """Where: relative to the run's folder, or `s3://bucket/prefix`. `{storage}` stands for the job's storage folder,
    `{run}` for the name of the run's folder."""
    rescue: str | None = None
    """A folder, or `s3://bucket/prefix`, for the last state when `folder` refuses it, and to look for one at the start;
    as `--rescue-dir` says it. Relative to the job file. Without one: a private folder in `$TMPDIR`."""
    every_steps: CountOrNone = 0
    """Steps between two checkpoints; 0: only by time. One is saved at the end too."""
    every_seconds: Annotated[float, Field(ge=0, le=LONGEST_SECONDS)] = 600.0
    """Seconds between two checkpoints; 0: only by steps. Both 0: nothing is ever saved."""
    keep: Count = 2
    """The newest so many stay."""
    keep_every: CountOrNone = 0
    """Those of every so many steps stay for good; 0: none."""
    keep_best: str | None = None
    """A metric of `eval` (`loss` too) whose best checkpoint stays; one is then saved after every evaluation."""
    memory_every: CountOrNone | Literal["auto"] = "auto"
    """Steps between two states in the launcher's memory, from which a team goes on that lost a rank. `auto`: as
    often as takes a hundredth of the time; 0: never."""

    @property
    def wanted(self) -> bool:
        """Whether anything is ever saved."""
        return bool(self.every_steps or self.every_seconds)


class Log(Section):
    """Where losses, learning rates and metrics go besides the run's own events. One run of each, written by rank 0."""

    to: tuple[Literal["csv", "jsonl", "tensorboard", "mlflow", "wandb", "trackio"], ...] = ()
    """`csv` and `jsonl` are files in the run's folder, `loggers/`; the others need their extra: dure[tensorboard], ….
    `wandb` is offline, `mlflow` a folder unless MLFLOW_TRACKING_URI is set."""
    every_steps: Count = 1
    """Of so many steps, one is logged; evaluations always are."""
    project: str | None = None
    """What the run belongs to, for loggers that know projects or experiments; the job's name when not given."""


class Job(Section):
    """What to train, on what, how, and by whom."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)] = "job"
    """Part of the run folder's name."""
    storage: str = "."
    """The shared storage, a folder relative to the job file or s3://bucket/prefix; `{storage}` stands for it."""
    hooks: Factory | None = None
    """Called in every rank; returns an object with any of `on_start`, `on_step`, `on_eval`, `on_save`, `on_end`."""
    model: Model
    data: Data
    eval: Eval = Eval()
    train: Train
    team: TeamSection = TeamSection()
    reduce: Reduce = Reduce()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    cluster: Cluster = Cluster()
    slurm: Slurm = Slurm()
    ray: Ray = Ray()
    kubernetes: Kubernetes = Kubernetes()

    @property
    def resumable(self) -> bool:
        """Whether a run of it saves states that it can go on from; ranks with models of their own have none."""
        return self.checkpoint.wanted and self.team.sync

    @model_validator(mode="after")
    def _a_shard_for_each_of_all(self) -> Job:
        ranks = self.cluster.nodes * self.team.ranks
        if ranks > self.team.shards:
            raise ValueError(
                f"{self.cluster.nodes} nodes with {self.team.ranks} ranks each are {ranks} ranks, but there are only "
                f"{self.team.shards} shards and each rank needs one; use fewer, or set team.shards to {ranks} or more "
                "(other bits)"
            )
        return self

    @model_validator(mode="after")
    def _one_model_to_shard(self) -> Job:
        if self.train.shard_optimizer and not self.team.sync:
            raise ValueError(
                "train.shard_optimizer is true, but with team.sync = false every rank updates a model of its own; "
                "turn one of them off"
            )
        return self

    @model_validator(mode="after")
    def _one_model_to_audit(self) -> Job:
        if self.train.audit and not self.team.sync:
            raise ValueError(
                "train.audit compares ranks that train one model, but team.sync is false; turn one of them off"
            )
        return self
