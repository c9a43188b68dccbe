"""The model that weights are loaded into: built without memory for its parameters where the file has them all.

Parameters are first made on the meta device: nothing is drawn at random and no memory is touched, only to be
overwritten. Buffers are made for real, as some are in no file. When the file covers every parameter, they get one
private piece of memory, which the windows fill. Else the model is built again, for real, from the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dure.base.errors import DureError
from dure.weights import huggingface
from dure.weights.huggingface import naming_of
from dure.weights.mapping import Match, match, wanted_of
from dure.weights.memory import FreshMemory, memory_for
from dure.weights.source import Source

Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Built:
    """A model with memory for every tensor, and what of the source belongs where."""

    module: nn.Module
    match: Match
    tensors: Mapping[str, torch.Tensor]
    """All parameters and buffers by name; two names of a tied weight have one tensor."""
    how: str
    """In words: whether its parameters were drawn from the seed first, and why."""
    fresh: FreshMemory | None = None
    """The memory of its parameters, if nothing has touched it yet."""


@dataclass(frozen=True)
class Sketch:
    """A model whose parameters may be shapes without values, and the way to build it for real."""

    make: Make
    module: nn.Module | None
    """None: it cannot be sketched."""
    why: str
    before: RandomState
    """The global generators before the sketch was made."""
    initialise_rest: Callable[[nn.Module], object] | None = None
    """Gives memory and first values to all that no file brings; without it such a model is built again."""


def sketch(model: Make | nn.Module, *, for_real: bool = False) -> Sketch:
    """Build the model without values for its parameters; one that is built already is taken as it is."""
    before = RandomState()
    if isinstance(model, nn.Module):
        return Sketch(lambda: model, model, "built before", before)
    if for_real:
        return Sketch(model, model(), "built from the seed first", before)
    try:
        with _parameters_without_memory():
            return Sketch(model, model(), "built without drawing weights", before)
    except DureError:
        raise
    except Exception as error:
        why = f"its factory needs the values of parameters ({type(error).__name__})"
        return Sketch(model, None, why, before)


def sketch_of_folder(source: Source, arguments: Mapping[str, Any]) -> Sketch:
    """The model that a Hugging Face folder's config.json describes, as from_pretrained would build it."""
    before = RandomState()

    def make() -> nn.Module:
        return huggingface.build(source, arguments)

    why = "built from config.json; what the file does not have is drawn from the seed"
    return Sketch(make, make(), why, before, huggingface.initialise_rest)


def build(drawn: Sketch, source: Source, *, strict: bool) -> Built:
    """Find out what the source has for the model, and have memory for every tensor of it."""
    module, why = drawn.module, drawn.why
    if module is not None:
        found = _match(module, source, strict)
        empty = _left_empty(module, found)
        if not empty or drawn.initialise_rest is not None:
            fresh = _give_memory(module, found)
            if drawn.initialise_rest is not None:
                drawn.before.restore()
                drawn.initialise_rest(module)
            return Built(module, found, named_tensors(module), why, fresh)
        why = f"{empty} is not in the file"
    drawn.before.restore()
    module = drawn.make()
    found = _match(module, source, strict)
    return Built(module, found, named_tensors(module), f"built from the seed first: {why}")


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, by every name they have."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _match(module: nn.Module, source: Source, strict: bool) -> Match:
    wanted, ties = wanted_of(module)
    return match(source, wanted, strict=strict, ties=ties, naming=naming_of(module))


def _left_empty(module: nn.Module, found: Match) -> str:
    """The first tensor that has no values, and none in the file; empty when there is none."""
    tensors = named_tensors(module)
    filled = {id(tensors[name]) for _, name in found.pairs}
    for name, tensor in tensors.items():
        if tensor.is_meta and id(tensor) not in filled:
            return name
    return ""


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Within `with`, new parameters of any module are shapes without values."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # A class of its own (a lazy parameter, a quantised one) may not survive it.
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))
        return made

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _give_memory(module: nn.Module, found: Match) -> FreshMemory:
    """Memory of their own for all tensors without any; whoever holds such a tensor keeps it.

    They lie in the order of the files' bytes, so that a window fills one run of it.
    """
    tensors = named_tensors(module)
    empty = {id(tensors[name]): tensors[name] for _, name in found.pairs if tensors[name].is_meta}
    memory = FreshMemory(sum(memory_for(tensor) for tensor in empty.values()))
    for tensor in empty.values():
        made = memory.tensor_like(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))
        torch.utils.swap_tensors(tensor, made)
    return memory


class RandomState:
    """The global generators as they stand now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy = numpy.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._torch)
        numpy.random.set_state(self._numpy)
        random.setstate(self._python)
