"""`dure.attach`: the fast exchange for a stock DDP model in a stock loop.

The model's buckets go through the same communication thread, the same shared memory and the same fixed order of sums as
a team's. Every rank counts as one shard, so replicas are equal and runs repeat at one number of ranks; the same bits on
any number of ranks need a team, which divides batches into shards.
"""

# No postponed annotations here: DDP looks at the hook's own.
import atexit
import gc
import os
import weakref
from collections import Counter
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dure.base.errors import ModelRefused, ReplicasDiffer, UsageError
from dure.comm.group import Group
from dure.comm.link_secret import read_link_secret
from dure.comm.process_groups import keep_process_groups
from dure.comm.reduce.exchanger import Pieces, Wire
from dure.comm.reduce.factory import ExchangerFactory
from dure.comm.reduce.hook import GradientExchange, StepExchange
from dure.comm.reduce.step_totals import StepTotals
from dure.comm.reduce.subtree_stack import SubtreeStack
from dure.comm.same_node import topology_of
from dure.comm.topology import leader_host
from dure.device.accelerator import CPU, is_host
from dure.device.fingerprint import fingerprint, optimizer_tensors
from dure.proof import detectors
from dure.proof.verify_replicas import who_differs

DEADLINE_SECONDS = 1800.0
"""As torch's own: a rank may save or evaluate while the others wait for it."""
_HALF = (1 << 32) - 1


def attach(
    model: DistributedDataParallel,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    check_every: int = 100,
    deadline_seconds: float = DEADLINE_SECONDS,
    watch: detectors.Mode = "warn",
) -> "Attached":
    """Let the gradients of a stock DDP model take dure's exchange, from its next backward pass on.

    The loop stays as it is. Gradients are averaged over ranks, added in rank order in fp32 at least, through shared
    memory within a node and beside the rest of the backward pass. After every `check_every` steps (0: never) the
    parameters, and the state of `optimizer` if it is given, are compared over ranks; the first tensor that differs is
    named, with its ranks, in the error that the next backward pass raises.

    `watch`: silent mistakes of the loop (a forgotten set_epoch, gradients that are not synchronised, …) are told in a
    line on stderr ("warn"), raise ("strict"), or are not looked for ("off").

    A collective call of all ranks, after `init_process_group`, once per model. What is returned needs not be kept.
    """
    if check_every < 0:
        raise UsageError(f"check_every is {check_every}; use 0 (never) or more")
    if watch not in detectors.MODES:
        raise UsageError(f"watch is {watch!r}; use warn, strict or off")
    _refuse_what_cannot_be_attached(model)
    keep_process_groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = topology_of(Group(None, rank, size), leader_host=leader_host(os.environ))
    exchangers = ExchangerFactory(
        topology,
        size,
        CPU,
        Wire(),
        "auto",
        deadline_seconds=deadline_seconds,
        link_secret=read_link_secret(os.environ),
    )
    attached = Attached(model, optimizer, check_every, exchangers, size)
    detectors.watch_model(model, watch)
    return attached


class Attached:
    """A DDP model whose gradients take dure's exchange; also a context manager that detaches at its end."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        check_every: int,
        exchangers: ExchangerFactory,
        size: int,
    ) -> None:
        """A collective call."""
        self._module = model.module
        self._model = weakref.ref(model)
        self._default_group = model.process_group
        self._optimizer = optimizer
        self._check_every = check_every
        self._group = exchangers.everyone
        self._shape = Pieces.of_step(size, size, size)
        self._steps = 0
        self._compared = _Compared(self)
        stack = SubtreeStack([p for p in model.module.parameters() if p.requires_grad])
        self._exchange: GradientExchange | None = GradientExchange(
            exchangers.exchanger(), stack, exchangers.wire
        )
        try:
            model.register_comm_hook(None, self._hook)
        except (RuntimeError, ValueError) as error:
            self.detach()
            raise ModelRefused(
                f"the model takes no communication hook of ours ({error}); attach a DistributedDataParallel without a "
                "hook, and without its mixed_precision option"
            ) from None
        atexit.register(self.detach)

    @property
    def steps(self) -> int:
        """Backward passes that were synchronised so far."""
        return self._steps

    def check(self) -> str:
        """Compare all ranks' parameters (and optimizer state) now; a collective call.

        Returns their common fingerprint, or raises ReplicasDiffer.
        """
        own = fingerprint(self.compared_tensors())
        everyones = self._group.gather(own, "comparing fingerprints")
        if len(set(everyones)) > 1:
            raise ReplicasDiffer(self.difference(self._steps))
        self._compared.agreed_after = self._steps
        return own

    def detach(self) -> None:
        """Go back to torch's own all-reduce, from the next backward pass on; on all ranks alike."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.close()
        atexit.unregister(self.detach)
        # DDP and its hook hold each other; they are freed while the interpreter is whole, or a thread of the process
        # group that wants it at its end would abort the process.
        atexit.register(gc.collect)

    def __enter__(self) -> "Attached":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def compared_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters, in name order, then the optimizer's state.

        Buffers are not compared: with DDP, every rank's forward pass writes its own.
        """
        named: list[tuple[str, torch.Tensor]] = sorted(
            self._module.named_parameters(), key=lambda pair: pair[0]
        )
        if self._optimizer is not None:
            named += [
                (f"the optimizer's state {name}", tensor)
                for name, tensor in optimizer_tensors(self._optimizer)
            ]
        return named

    def difference(self, step: int) -> str:
        """Which rank holds other bits of which tensor after a step; a collective call."""
        told = who_differs(self.compared_tensors(), self._group, step, "state")
        return f"{told} (last found equal after step {self._compared.agreed_after})"

    def is_due(self, step: int) -> bool:
        """Whether replicas are compared after a step."""
        return self._check_every > 0 and step % self._check_every == 0

    def _hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        exchange = self._exchange
        if exchange is None:
            return allreduce_hook(self._default_group, bucket)
        model = self._model()
        if model is not None and model._join_config.enable:
            raise UsageError(
                "the model is inside DDP's join(), which exchanges other buckets on ranks that have ended; give all "
                "ranks the same number of batches, or do not attach"
            )
        if bucket.buffer().is_sparse:
            raise ModelRefused("a gradient is sparse, which the exchange cannot add; use sparse=False")
        if bucket.index() == 0:
            totals = _Totals.of_rank(self._group, self._steps, self._compared)
            exchange.begin(StepExchange(self._shape, self._group.rank, totals))
        if bucket.is_last():
            self._steps += 1
        # An exception that is a future's value is none to C++; one that is raised in a callback is.
        return exchange.hook(None, bucket).then(torch.futures.Future.value)


def _refuse_what_cannot_be_attached(model: DistributedDataParallel) -> None:
    """Name the first thing that the exchange cannot do."""
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"attach takes a DistributedDataParallel, and this is a {type(model).__name__}; wrap the model first (for "
            "a compiled one, attach before torch.compile)"
        )
    if dist.get_process_group_ranks(model.process_group) != list(range(dist.get_world_size())):
        raise UsageError(
            "the model's process group is not all ranks, and attach exchanges over all; leave process_group out"
        )
    for name, part in model.module.named_modules():
        if getattr(part, "sparse", False) is True:
            raise ModelRefused(
                f"{f'layer {name}' if name else 'the model'} ({type(part).__name__}) has sparse gradients, which the "
                "exchange cannot add; use sparse=False"
            )
    for name, parameter in model.module.named_parameters():
        if not is_host(parameter.device):
            raise ModelRefused(
                f"{name} is on {parameter.device}, and attach is for models on the CPU; a device's own collectives "
                "are as fast there"
            )
        if parameter.requires_grad and parameter.is_complex():
            raise ModelRefused(
                f"{name} is complex, which the exchange cannot add; keep it as two real numbers"
            )


@dataclass
class _Compared:
    """What the communication thread knows of comparisons."""

    attached: Attached
    agreed_after: int = 0
    """The last step after which replicas were found equal."""


@dataclass
class _Totals(StepTotals):
    """A step's numbers, with a fingerprint of each rank's state from before the step in place of losses and flags.

    Filled and looked at in the communication thread: the weights do not change before the backward pass is over.
    """

    rank: int = 0
    step: int = 0
    compared: _Compared | None = None

    @classmethod
    def of_rank(cls, group: Group, step: int, compared: _Compared) -> "_Totals":
        """Before a step; every rank counts as one shard."""
        empty = StepTotals.empty(group.size, group.size)
        empty.counts[group.rank] = 1.0
        empty.steps[group.rank] = step
        return cls(**vars(empty), rank=group.rank, step=step, compared=compared)

    def as_vector(self) -> torch.Tensor:
        """See `StepTotals`."""
        assert self.compared is not None
        attached = self.compared.attached
        if attached.is_due(self.step):
            bits = int(fingerprint(attached.compared_tensors()), 16)
            self.losses[self.rank], self.flags[self.rank] = float(bits >> 32), bits & _HALF
        return super().as_vector()

    def refuse_other_steps(self) -> None:
        """Raise, on all ranks alike, unless all are in the same step and hold the same bits."""
        if len(set(self.steps)) > 1:
            most, _ = Counter(self.steps).most_common(1)[0]
            odd = [f"rank {rank} {step}" for rank, step in enumerate(self.steps) if step != most]
            raise UsageError(
                f"ranks have taken different numbers of steps: {', '.join(odd)}, the others {most}; every rank must "
                "synchronise the same backward passes"
            )
        assert self.compared is not None
        if not self.compared.attached.is_due(self.step):
            return
        if len(set(zip(self.losses, self.flags, strict=True))) > 1:
            raise ReplicasDiffer(self.compared.attached.difference(self.step))
        self.compared.agreed_after = self.step
