"""The model as a DDP replica: what it may not do, its buffers, and the start-up probe."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from dure.base.errors import ModelRefused
from dure.comm.group import Group
from dure.device.accelerator import is_host
from dure.device.fingerprint import fingerprint, named_weights
from dure.step.unused import graph_of


def refuse_what_cannot_be_exact(module: torch.nn.Module) -> None:
    """Name the first part of the model whose result would depend on the number of ranks."""
    if isinstance(module, DistributedDataParallel):
        raise ModelRefused("the model is a DistributedDataParallel already; hand over the module inside it")
    for name, part in module.named_modules():
        where = f"{f'layer {name}' if name else 'the model'} ({type(part).__name__})"
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise ModelRefused(
                f"{where} computes statistics over ranks, so the bits would depend on their number; "
                "use BatchNorm (statistics of a shard), GroupNorm or LayerNorm"
            )
        if getattr(part, "sparse", False) is True:
            raise ModelRefused(f"{where} has sparse gradients, which the tree cannot add; use sparse=False")
    for name, buffer in module.named_buffers():
        if buffer.layout != torch.strided:
            raise ModelRefused(
                f"the buffer {name} is sparse ({buffer.layout}), so it can be neither restored nor saved by its bytes; "
                "keep it dense, or keep its indices and values as two buffers"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise ModelRefused(
                f"the buffer {name} is expanded: several of its elements share one place in memory, so it cannot be "
                "restored; register a copy (.clone())"
            )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ModelRefused(f"{name} is complex, which the tree cannot add; keep it as two real numbers")
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ModelRefused(
                f"{name} has no shape yet (a lazy module); run one forward pass in the factory"
            )
    refuse_hooks_on_sums(module)


def refuse_hooks_on_sums(module: torch.nn.Module) -> None:
    """Raise ModelRefused where something waits for a parameter's `.grad`: what it would see depends on the ranks."""
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ModelRefused(
                f"{name} has a hook that is called when its gradient was accumulated "
                "(register_post_accumulate_grad_hook), where only this rank's part of the sum is; change gradients "
                "with register_hook, which sees each shard's, or between team.forward_backward and team.update"
            )


def compile_by_shape_alone() -> None:
    """Have torch.compile make each kernel from the shapes it is for, whatever came before in this process.

    By default the second shape that it meets gives a kernel for all shapes, and after a number of shapes the rest
    silently runs uncompiled: the bits would depend on the order of shards, and so on the number of ranks.
    """
    config = importlib.import_module("torch._dynamo.config")
    config.automatic_dynamic_shapes = False  # type: ignore[attr-defined]
    config.fail_on_recompile_limit_hit = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Look at compiled code as eager code: where it meets a dispatch mode, it would silently stay eager for ever."""
    if _COMPILER in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    yield  # nothing is compiled yet, so the compiler need not be imported to say so
    if _COMPILER in sys.modules:
        torch.compiler.reset()  # the forward pass itself compiles


_COMPILER = "torch._dynamo.eval_frame"

MOST_BUCKET_MIB = 25.0
LEAST_BUCKET_MIB = 1.0
OVERLAPPING_BUCKETS = 8


def bucket_mib(gradient_bytes: int, free_cores: int) -> float:
    """How large DDP's buckets should be. Never changes a bit.

    With cores to spare the exchange hides behind the rest of the backward pass: buckets small enough that most
    are gone before it ends, and not so small that barriers cost more than bytes. Without, nothing can hide and
    one more barrier is all that another bucket costs; but what was just written is still in the caches, so the
    largest size stays.
    """
    if free_cores <= 0:
        return MOST_BUCKET_MIB
    wanted = gradient_bytes / OVERLAPPING_BUCKETS / 2**20
    return min(max(wanted, LEAST_BUCKET_MIB), MOST_BUCKET_MIB)


def wrap(module: torch.nn.Module, *, free_cores: int) -> DistributedDataParallel:
    """A real DDP that neither broadcasts weights (they are verified instead) nor buffers (shard 0's count)."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelRefused("no parameter of the model requires a gradient; there is nothing to train")
    on_host = is_host(next(module.parameters()).device)
    gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    # It says itself that it is no error: of a weight with one row, the gradient may come transposed.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    return DistributedDataParallel(
        module,
        init_sync=False,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mib(gradient_bytes, free_cores) if on_host else None,
    )


def same_start(module: torch.nn.Module, group: Group) -> str:
    """The fingerprint of the weights, the same on all ranks, or an error that says which differ."""
    own = fingerprint(named_weights(module))
    everyones = group.gather(own, "comparing the first weights")
    if len(set(everyones)) > 1:
        odd = [rank for rank, other in enumerate(everyones) if other != everyones[0]]
        raise ModelRefused(
            f"the model starts with other weights on rank(s) {', '.join(map(str, odd))} than on rank 0; "
            "build it from the run's seed alone (no clock, no process id, no rank)"
        )
    return own


class Buffers:
    """Buffers that the forward pass writes, such as BatchNorm's statistics: every shard starts from the
    step's first value, and shard 0's result becomes the next step's, on every rank."""

    def __init__(
        self, module: torch.nn.Module, names: Iterable[str], beside: Sequence[torch.nn.Module] = ()
    ) -> None:
        """`beside` are models that the loss uses too; their buffers are treated alike."""
        wanted = set(names)
        named = buffers_of(module, beside)
        self._buffers = [buffer for name, buffer in named.items() if name in wanted]
        self._others = [(name, b) for name, b in named.items() if name not in wanted and not b.is_inference()]
        self._versions: list[int] = []
        self._start = [buffer.clone() for buffer in self._buffers]
        self._kept = [buffer.clone() for buffer in self._buffers]

    def begin(self) -> None:
        """At the start of a step: this is the value that all shards start from."""
        self._versions = [buffer._version for _, buffer in self._others]
        if self._buffers:
            torch._foreach_copy_(self._start, self._buffers)

    def restore(self) -> None:
        """Before a shard: back to the step's first value."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._start)

    def keep(self) -> None:
        """After this rank's first shard: its values are the ones that count."""
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)

    def settle(self, group: Group | None) -> None:
        """At the end of a step: shard 0's values everywhere (without a group, this rank's own)."""
        for (name, buffer), version in zip(self._others, self._versions, strict=True):
            if buffer._version != version:
                raise ModelRefused(
                    f"the forward pass writes the buffer {name} now, but did not at the start, so shards did not start "
                    f"from the same value; write it in every forward pass ({name}.copy_({name}) will do)"
                )
        if not self._buffers:
            return
        torch._foreach_copy_(self._buffers, self._kept)
        if group is None:
            return
        for same in _by_dtype(self._buffers):
            flat = torch.cat([buffer.reshape(-1) for buffer in same])
            group.from_leader(flat, "sharing buffers")
            parts = flat.split([buffer.numel() for buffer in same])
            torch._foreach_copy_(same, [p.view_as(b) for p, b in zip(parts, same, strict=True)])


def buffers_of(module: torch.nn.Module, beside: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """All buffers by name, each once; those of models beside the trained one with their number before it."""
    return _named(module, beside, torch.nn.Module.named_buffers)


def _parameters_of(
    module: torch.nn.Module, beside: Sequence[torch.nn.Module]
) -> dict[str, torch.nn.Parameter]:
    return _named(module, beside, torch.nn.Module.named_parameters)


def _named(module: torch.nn.Module, beside: Sequence[torch.nn.Module], of: Any) -> dict[str, Any]:
    named = dict(of(module))
    known = {id(tensor) for tensor in named.values()}
    for at, other in enumerate(beside):
        for name, tensor in of(other):
            if id(tensor) not in known:
                known.add(id(tensor))
                named[f"{BESIDE}{at}.{name}"] = tensor
    return named


BESIDE = "beside "


def _by_dtype(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups.values()


@dataclass(frozen=True)
class ProbeResult:
    """What the start-up probe learned about the model."""

    unused: tuple[str, ...]
    """Parameters that took no part in some probed shard."""
    written: tuple[str, ...]
    """Buffers that the forward pass writes."""
    common: tuple[str, str] = ("", "")
    """Fingerprints of samples that every rank reads, and of what it computes from them: the same on all ranks."""

    def with_others(self, group: Group) -> ProbeResult:
        """What any rank learned; raises where ranks compute other bits from the same samples."""
        everyones = [json.loads(text) for text in group.gather(json.dumps(vars(self)), "the start-up probe")]
        for at, what in enumerate(("reads other samples", "computes other bits from the same samples")):
            seen = [one["common"][at] for one in everyones]
            most, _ = Counter(seen).most_common(1)[0]
            odd = [str(rank) for rank, bits in enumerate(seen) if bits != most]
            if odd:
                raise ModelRefused(
                    f"rank {', '.join(odd)} {what} than the others: does the model, the dataset or the collate "
                    "function look at the rank, the host or the clock? Replicas can only be the same if they do not "
                    "(or this machine computes differently: another processor, another library)"
                )
        unused, written = (
            tuple(sorted({name for one in everyones for name in one[what]})) for what in ("unused", "written")
        )
        return ProbeResult(unused, written, self.common)


_DETERMINISTIC_INSTEAD = {
    "adaptive_avg_pool": "for one place per channel x.mean((2, 3)), otherwise AvgPool with a fixed kernel",
    "adaptive_max_pool": "MaxPool with a fixed kernel",
    "max_unpool": "an upsampling of your own by indexing",
    "ctc_loss": "the loss on the CPU: F.ctc_loss(log_probs.cpu(), ...)",
    "nll_loss2d": "the loss over (samples, classes): move the classes to the end and flatten",
    "upsample": "mode='nearest', or a transposed convolution",
    "pad": "F.pad with mode='constant'",
    "histc": "torch.bincount on the CPU",
    "put_": "index_put_, scatter or torch.where",
}
"""What serves in place of an operator without a deterministic kernel, by a part of its name."""


@contextlib.contextmanager
def refusing_what_is_not_deterministic() -> Iterator[None]:
    """Within `with`, an operator that has no deterministic kernel on its device is refused by its name."""
    try:
        yield
    except RuntimeError as error:
        name, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found or isinstance(error, ModelRefused):
            raise
        name = name.rsplit(" ", 1)[-1]
        instead = next((words for part, words in _DETERMINISTIC_INSTEAD.items() if part in name), "")
        raise ModelRefused(
            f"the operator {name} has no deterministic kernel on this device, so its bits would differ from run to "
            f"run; use {instead or 'another one'}, or team.device = cpu"
        ) from error


@refusing_what_is_not_deterministic()
def probe(
    module: torch.nn.Module,
    shard_loss: Callable[[], torch.Tensor],
    other_losses: Iterable[Callable[[], torch.Tensor]],
    common_loss: Callable[[], torch.Tensor] | None = None,
    beside: Sequence[torch.nn.Module] = (),
) -> tuple[ProbeResult, str]:
    """Compute a shard, others, and the first again: the bits must be the same.

    That catches models with a state or a randomness of their own. Nothing of the model is changed. Returns besides
    the fingerprint of what came of `common_loss`, which is computed first. `beside` are models that the loss uses too.
    """
    start = {name: buffer.clone() for name, buffer in buffers_of(module, beside).items()}
    buffers = Buffers(module, start, beside)
    identities = {name: id(buffer) for name, buffer in buffers_of(module, beside).items()}
    parameters = {
        name: (p._version, fingerprint([("", p)])) for name, p in _parameters_of(module, beside).items()
    }
    unused: set[str] = set()
    written: set[str] = set()
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]

    def computed(loss_of: Callable[[], torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        buffers.restore()
        versions = {name: buffer._version for name, buffer in buffers_of(module, beside).items()}
        grads = [(p.grad, None if p.grad is None else p.grad._version) for _, p in named]
        loss = loss_of()
        if any(
            p.grad is not old or (old is not None and old._version != version)
            for (_, p), (old, version) in zip(named, grads, strict=True)
        ):
            raise ModelRefused(
                "the loss calls backward() itself; return it, and the step runs the backward pass. Gradients that the "
                "loss needs come from torch.autograd.grad(..., create_graph=True)"
            )
        gradients = _gradients(loss, [p for _, p in named])
        used = [(name, g) for (name, _), g in zip(named, gradients, strict=True) if g is not None]
        for name, gradient in used:
            if gradient.is_sparse:
                raise ModelRefused(
                    f"{name} has a sparse gradient, which the tree cannot add; use sparse=False"
                )
        unused.update(name for (name, _), g in zip(named, gradients, strict=True) if g is None)
        now = buffers_of(module, beside)
        # A version tells of writes that change nothing yet, the bits of writes through .data, which has none.
        written.update(
            name
            for name in start
            if name in now
            and (now[name]._version != versions[name] or not _same_bits(start[name], now[name]))
        )
        return [("loss", loss), *used, *now.items()]

    with _eager(), _NoCollectives():
        common = fingerprint(computed(common_loss or shard_loss))
    first = fingerprint(computed(shard_loss))
    for other_loss in other_losses:
        computed(other_loss)  # nobody asks for its bits
    again = fingerprint(computed(shard_loss))
    replaced = [n for n, buffer in buffers_of(module, beside).items() if identities.get(n) != id(buffer)]
    if replaced:
        raise ModelRefused(
            f"the forward pass replaces the buffer {replaced[0]}; write into it instead (copy_)"
        )
    buffers.restore()
    if again != first:
        raise ModelRefused(
            "the same shard, computed again, gives other bits: the model keeps a state outside of its buffers, "
            "or draws random numbers that the global generators of torch, numpy and random do not know; "
            "keep state in buffers and draw from the global generators"
        )
    for name, p in _parameters_of(module, beside).items():
        if parameters.get(name) != (p._version, fingerprint([("", p)])):
            raise ModelRefused(
                f"the forward pass writes the parameter {name}: once per shard, so the bits would depend on how many a "
                "rank computes. Make it a buffer (register_buffer), or write it after the step"
            )
    return ProbeResult(tuple(sorted(unused)), tuple(sorted(written))), common


def _gradients(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> tuple[torch.Tensor | None, ...]:
    if not loss.requires_grad:
        raise ModelRefused(
            "the loss does not depend on any trained parameter; is the model's output detached, or computed under "
            "torch.no_grad()?"
        )
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph_of(loss)):
        raise ModelRefused(
            "the model uses reentrant activation checkpointing, which hides parameters from DDP; call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return fingerprint([("", one)]) == fingerprint([("", other)])


class _NoCollectives(TorchDispatchMode):
    """Refuses collectives inside the forward and backward pass, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise ModelRefused(
                f"the model calls the collective {func} in its forward or backward pass; shards are computed one "
                "by one, so ranks would wait for each other for ever. Exchange outside of the model"
            )
        return func(*args, **(kwargs or {}))
