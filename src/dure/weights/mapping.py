"""Which tensor of a source belongs to which of the model's: exact by default, and all that is wrong said at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dure.base.errors import WeightsError
from dure.storage.safetensors import TensorAt, said
from dure.weights.source import Source

Wanted = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The model's parameters and persistent buffers by name, tied ones under each of their names: shape and dtype."""

PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel puts before every name, and torch.compile before or inside of it."""

_SHOWN = 5
_COMPARED = 2000
"""Names that are looked through for one that is spelt almost the same."""


@dataclass(frozen=True)
class Naming:
    """What an architecture itself knows of names in its files; `huggingface.naming_of` makes one."""

    rename: Callable[[str], str] = lambda name: name
    """From a name in the file to the model's."""
    may_be_missing: Callable[[str], bool] = lambda name: False
    may_be_unexpected: Callable[[str], bool] = lambda name: False


PLAIN = Naming()


@dataclass(frozen=True)
class Match:
    """Who gets what."""

    pairs: tuple[tuple[TensorAt, str], ...]
    """A tensor of the source, and the name of the model's; in the order of the source's bytes."""
    missing: tuple[str, ...]
    """The model's names that the source has nothing for: they keep what they were built with."""
    unexpected: tuple[str, ...]
    """The source's names that the model has no place for."""


def wanted_of(
    module: torch.nn.Module,
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], list[list[str]]]:
    """What `match` asks of a model, also of one on the meta device: its tensors, and the names that share one."""
    state = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    same: dict[int, list[str]] = {}
    for name, tensor in state.items():
        same.setdefault(id(tensor), []).append(name)
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    return wanted, [names for names in same.values() if len(names) > 1]


def match(
    source: Source,
    wanted: Wanted,
    *,
    strict: bool,
    ties: Iterable[Sequence[str]] = (),
    prefixes: Sequence[str] = PREFIXES,
    naming: Naming = PLAIN,
) -> Match:
    """Pair the source's tensors with the model's by name, or say in one error all that does not fit.

    A tensor takes the model's tensor of its own name; else of its name without `prefixes`; else of the name that
    `naming` gives it. Of tied names (`ties`), one is enough; when the source has several, the last counts, as it
    does in `load_state_dict`. Without `strict`, what is missing or unexpected is reported in the result only.
    """
    found = _Names(wanted, prefixes, naming)
    taken: dict[str, TensorAt] = {}
    twice: list[str] = []
    unexpected: list[str] = []
    for tensor in source.tensors:
        name = found.of(tensor.name)
        if name is None:
            if not naming.may_be_unexpected(tensor.name):
                unexpected.append(tensor.name)
        elif name in taken:
            # An exact name beats a shortened one; of two shortened ones, neither can be told to be right.
            exact = [t for t in (taken[name], tensor) if t.name == name]
            if not exact:
                twice.append(f"{said(taken[name].name)} and {said(tensor.name)} are both {said(name)}")
            else:
                taken[name] = exact[0]
        else:
            taken[name] = tensor
    for names in ties:
        present = [name for name in names if name in taken]
        for name in present[:-1]:
            del taken[name]
    tied = {name for names in ties for name in names if any(other in taken for other in names)}
    missing = [n for n in wanted if n not in taken and n not in tied and not naming.may_be_missing(n)]
    problems = _Problems(source, wanted, missing, unexpected, twice)
    problems.compare(taken)
    problems.refuse(strict=strict, matched=len(taken))
    order = {id(tensor): place for place, tensor in enumerate(source.tensors)}
    pairs = sorted(((tensor, name) for name, tensor in taken.items()), key=lambda pair: order[id(pair[0])])
    return Match(tuple(pairs), tuple(missing), tuple(unexpected))


class _Names:
    """From the source's names to the model's."""

    def __init__(self, wanted: Wanted, prefixes: Sequence[str], naming: Naming) -> None:
        self._wanted = wanted
        self._prefixes = prefixes
        self._rename = naming.rename
        self._bare = {self._without_prefixes(name): name for name in wanted}

    def of(self, name: str) -> str | None:
        """The model's name, if it has one."""
        if name in self._wanted:
            return name
        bare = self._without_prefixes(name)
        if bare in self._bare:
            return self._bare[bare]
        renamed = self._rename(bare)
        return renamed if renamed in self._wanted else self._bare.get(renamed)

    def _without_prefixes(self, name: str) -> str:
        before = ""
        while name != before:
            before = name
            for prefix in self._prefixes:
                name = name.removeprefix(prefix)
        # torch.compile of one layer puts its mark inside of the name.
        return name.replace("._orig_mod.", ".") if "_orig_mod." in self._prefixes else name


@dataclass(frozen=True)
class _Problems:
    """All that does not fit, for one error."""

    source: Source
    wanted: Wanted
    missing: Sequence[str]
    unexpected: Sequence[str]
    twice: Sequence[str]
    shapes: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def compare(self, taken: Mapping[str, TensorAt]) -> None:
        """Shapes must be the same; numbers may change their precision, not their kind."""
        for name, tensor in taken.items():
            shape, dtype = self.wanted[name]
            if tensor.shape != shape:
                there, here = list(tensor.shape), list(shape)
                self.shapes.append(f"{said(name)} is {there} in the file and {here} in the model")
            elif not _convertible(tensor.dtype, dtype):
                self.kinds.append(f"{said(name)} is {tensor.dtype} in the file and {dtype} in the model")

    def refuse(self, *, strict: bool, matched: int) -> None:
        """One error with everything, or none."""
        says = []
        loose = strict or matched == 0
        if loose and self.missing:
            listed = _few(
                _with_guess(name, self.unexpected, "the file has") for name in self.missing[:_SHOWN]
            )
            says.append(f"{len(self.missing)} missing in the file: {listed}{_more(self.missing)}")
        if loose and self.unexpected:
            listed = _few(
                _with_guess(name, self.missing, "the model has") for name in self.unexpected[:_SHOWN]
            )
            says.append(
                f"{len(self.unexpected)} that the model has no place for: {listed}{_more(self.unexpected)}"
            )
        for problems, what in (
            (self.shapes, "of another shape"),
            (self.kinds, "of another kind of number"),
            (self.twice, "named twice"),
        ):
            if problems:
                says.append(f"{len(problems)} {what}: {_few(problems[:_SHOWN])}{_more(problems)}")
        if not says:
            return
        files = ", ".join(path for path, _ in self.source.files[:3]) + (
            " …" if len(self.source.files) > 3 else ""
        )
        raise WeightsError(
            f"the weights in {files} do not fit the model ({matched} of {len(self.wanted)} tensors do): "
            f"{'; '.join(says)}. {self._way_out(strict, matched)}"
        )

    def _way_out(self, strict: bool, matched: int) -> str:
        if matched == 0:
            return "Not one name is the same: these are weights of another architecture"
        if self.shapes or self.kinds or self.twice:
            return (
                "Build the model with the sizes that the file has, or give a layer that is to be new another name, so "
                "that it is missing, with model.strict = false"
            )
        return (
            "If that is meant, as for a new head on a pretrained body, set model.strict = false: what is missing keeps "
            "the values that the model was built with, what has no place is left out"
        )


def _convertible(one: torch.dtype, other: torch.dtype) -> bool:
    if one == other:
        return True
    if torch.bool in (one, other):
        return False
    return (one.is_floating_point, one.is_complex) == (other.is_floating_point, other.is_complex)


def _with_guess(name: str, others: Sequence[str], who: str) -> str:
    # Comparing costs by length, and names of a strange file may be of any.
    near = difflib.get_close_matches(
        name[:200], [other for other in others[:_COMPARED] if len(other) <= 200], n=1, cutoff=0.8
    )
    return f"{said(name)} ({who} {said(near[0])})" if near else said(name)


def _few(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def _more(listed: Sequence[str]) -> str:
    return f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
