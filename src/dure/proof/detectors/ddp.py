"""One DDP model of a stock script: what its ranks compute from, with which random numbers, and whether they agree."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

from dure.device.fingerprint import raw_bytes
from dure.proof.detectors.board import odd_ones, ranks_in_words
from dure.proof.detectors.report import Report, script_place
from dure.proof.detectors.token_means import LogitsLook
from dure.proof.detectors.unsynced import UnsyncedLook

if TYPE_CHECKING:
    from dure.proof.detectors.watch import Watch

FIRST_PASSES = 3
"""Training passes whose inputs and random numbers are looked at; a mistake shows in all of them."""
_MOST_BUCKETS = 128
_MOST_BYTES = 64 << 20
"""Hashed at a time; more would take the place of the step."""
_MOST_INPUT_BYTES = 1 << 20
_SEEDS = 5
_LONGEST_INTERVAL = 1024
_OWN_STATISTICS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def is_due(step: int) -> bool:
    """Whether replicas are compared at an update, counted from 1: at the first four, then ever less often."""
    return step <= 4 or step & (step - 1) == 0 or step % _LONGEST_INTERVAL == 0


@dataclass
class _Pass:
    """One training pass through the model."""

    inputs: str
    torch: str
    """The state of torch's random numbers when it began; `numpy` likewise."""
    numpy: str
    draws: bool = False
    """Whether it drew any of torch's."""
    torch_since: bool = False
    """Whether any were drawn between the one before and this one; `numpy_since` likewise."""
    numpy_since: bool = False


class ModelLook:
    """Looks at one model, through its own hooks and those of optimizers."""

    def __init__(self, watch: Watch, model: DistributedDataParallel, number: int) -> None:
        # The model's hooks hold this look: a reference back would keep both.
        self._watch, self._model = watch, weakref.ref(model)
        self._number = number
        self.updates = 0
        self._passes: list[_Pass] = []
        self._compared = False
        self._dice_after = _Dice.now()
        self._place = ""
        self._forwards = 0
        """Passes that want gradients."""
        self._forwards_before: dict[int, int] = {}
        """By optimizer: those before its last update."""
        self._synced = True
        """Whether DDP was to synchronise the last of them."""
        self._logits = LogitsLook(watch, number)
        self._unsynced = UnsyncedLook(watch, number)

    def before_forward(
        self, model: DistributedDataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """At the begin of every pass."""
        if not (torch.is_grad_enabled() and model.training):
            return
        if not self.updates and not self._passes:
            self._watch.saves.begins_to_train()
        self._forwards += 1
        self._synced = bool(model.require_backward_grad_sync)
        self._unsynced.before_forward(model, synced=self._synced)
        if len(self._passes) < FIRST_PASSES:
            self._place = script_place()
            dice = _Dice.now()
            found = _Pass(_inputs(args, kwargs), dice.torch_mark, dice.numpy_mark)
            if self._passes:
                found.torch_since = dice.torch_drawn_since(self._dice_after)
                found.numpy_since = dice.numpy_mark != self._dice_after.numpy_mark
            self._passes.append(found)
            self._dice_after = dice

    def after_forward(self, model: DistributedDataParallel, _: Any, output: Any) -> None:
        """At the end of every pass."""
        if not (torch.is_grad_enabled() and model.training) or self._compared or not self._passes:
            return
        self._logits.look(output, self._place)
        before, self._dice_after = self._dice_after, _Dice.now()
        self._passes[-1].draws = before.torch_mark != self._dice_after.torch_mark
        if len(self._passes) == FIRST_PASSES:
            self._compared = True
            self._compare_passes()

    def _compare_passes(self) -> None:
        board = self._watch.board
        model = self._model()
        if board is None or model is None:
            return
        told = board.publish(f"{self._number}/passes", [vars(one) for one in self._passes])
        if told is None:
            return
        by_pass = list(zip(*told, strict=True))
        self._find_same_inputs(by_pass)
        torch_alike, numpy_alike = (
            all(len({one[kind] for one in ranks}) == 1 for ranks in by_pass) for kind in ("torch", "numpy")
        )
        later = [one for ranks in by_pass[1:] for one in ranks]
        if torch_alike and all(one["draws"] for ranks in by_pass for one in ranks):
            what, seeds = (
                "the model's own random numbers (dropout) are the same on all ranks",
                "torch.manual_seed",
            )
        elif torch_alike and all(one["torch_since"] for one in later):
            what, seeds = (
                "the random numbers between passes (augmentation) are the same on all ranks",
                "torch.manual_seed",
            )
        elif numpy_alike and all(one["numpy_since"] for one in later):
            what, seeds = (
                "numpy's random numbers (augmentation) are the same on all ranks",
                "numpy.random.seed",
            )
        else:
            return
        text = f"{what}, which have one seed; once the model is made, call {seeds}(seed + dist.get_rank())"
        self._watch.tell(Report(text, "same-random-numbers", self._place))

    def _find_same_inputs(self, by_pass: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        ranks = range(len(by_pass[0]))
        sequences = [tuple(one[rank]["inputs"] for one in by_pass) for rank in ranks]
        # A script without data, as benchmarks are, has the same batch in every step.
        varied = [len(set(sequence)) == len(sequence) for sequence in sequences]
        same = [rank for rank in ranks if varied[rank] and sequences.count(sequences[rank]) > 1]
        if same:
            text = (
                f"{ranks_in_words(same)} train on the same batches; give the DataLoader a DistributedSampler (or each "
                "rank its own part of the data)"
            )
            self._watch.tell(Report(text, "overlap", self._place))

    def before_update(self, optimizer: int, own: set[int]) -> None:
        """Before the step of an optimizer; `own` are the identities of its parameters."""
        model = self._model()
        if model is None:
            return
        trained = [
            (name, parameter)
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and id(parameter) in own
        ]
        if not trained:
            return
        self.updates += 1
        if self.updates <= FIRST_PASSES or is_due(self.updates):
            self._unsynced.before_update()
        forwards = self._forwards - self._forwards_before.get(optimizer, 0)
        self._forwards_before[optimizer] = self._forwards
        if is_due(self.updates):
            place = script_place()
            if not _averages_weights(model):
                self._compare_replicas(trained, forwards, place)
            self._compare_buffers(model, place)

    def _compare_replicas(
        self,
        trained: list[tuple[str, torch.nn.Parameter]],
        forwards: int,
        place: str,
    ) -> None:
        board = self._watch.board
        if board is None:
            return
        window = _window(trained, self.updates)
        facts = {
            "names": xxhash.xxh3_64_hexdigest(" ".join(name for name, _ in window).encode()),
            "gradients": _hashes((name, parameter.grad) for name, parameter in window),
            "weights": _hashes(window),
            "forwards": forwards,
            "synced": self._synced,
            "place": place,
        }
        told = board.publish(f"{self._number}/update/{self.updates}", facts)
        if told is None or len({one["names"] for one in told}) > 1:
            return  # of a sharded optimizer, ranks have other parameters each
        at = _first_difference([one["gradients"] for one in told])
        if at is not None:
            odd = odd_ones([one["gradients"] for one in told])
            self._watch.tell(self._lost_sync(told, odd, _bucket_name(window, at)))
            return
        at = _first_difference([one["weights"] for one in told])
        if at is not None:
            odd = odd_ones([one["weights"] for one in told])
            text = (
                f"before update {self.updates} the replicas differ on {ranks_in_words(odd)}, first in "
                f"{_bucket_name(window, at)}, though their gradients are the same: an earlier update was not "
                "synchronised "
                "(the last, shorter accumulation of an epoch?), or ranks wrote other weights"
            )
            self._watch.tell(Report(text, "replicas-apart", place))

    def _lost_sync(self, told: list[dict[str, Any]], odd: list[int], name: str) -> Report:
        where = f"update {self.updates}: gradients differ on {ranks_in_words(odd)}, first in {name}"
        place = told[odd[0]]["place"]
        around = [rank for rank, one in enumerate(told) if one["forwards"] == 0]
        if around:
            text = (
                f"{where}: {ranks_in_words(around)} computed them around DDP (model.module(…), or no forward "
                "pass), which "
                "then does not synchronise; call the DDP model itself"
            )
            return Report(text, "sync-lost", place)
        unsynced = [rank for rank, one in enumerate(told) if not one["synced"]]
        if unsynced:
            text = (
                f"{where}: the last forward pass before it was under no_sync (require_backward_grad_sync was off) on "
                f"{ranks_in_words(unsynced)}; leave no_sync for the last one of each accumulation, its forward pass too"
            )
            return Report(text, "no-sync", place)
        text = (
            f"{where}: their synchronisation was lost; something wrote to them after backward, or parameters were "
            "put into "
            "the model after DDP was made"
        )
        return Report(text, "sync-lost", place)

    def _compare_buffers(self, model: DistributedDataParallel, place: str) -> None:
        board = self._watch.board
        if board is None or model.will_sync_module_buffers():
            return  # before each pass all ranks get rank 0's
        named = [
            (f"{name}.{kind}", buffer)
            for name, part in model.module.named_modules()
            if isinstance(part, _OWN_STATISTICS)
            for kind, buffer in part.named_buffers(recurse=False)
        ]
        if not named:
            return
        told = board.publish(f"{self._number}/buffers/{self.updates}", [_hashes(named), place])
        if told is None:
            return
        hashes = [one for one, _ in told]
        at = _first_difference(hashes)
        if at is not None:
            text = (
                f"BatchNorm's statistics differ on {ranks_in_words(odd_ones(hashes))}, first {named[at][0]}: "
                "every rank keeps "
                "its own (broadcast_buffers or forward_sync_buffers is off), and evaluates another model than "
                "rank 0 saves; "
                "leave it on, or use torch.nn.SyncBatchNorm"
            )
            self._watch.tell(Report(text, "buffers", place))


def _averages_weights(model: DistributedDataParallel) -> bool:
    """Whether replicas differ on purpose: local SGD averages weights now and then, instead of gradients."""
    hooks = getattr(model, "_comm_hooks", ())
    return "accelerate.local_sgd" in sys.modules or any(
        type(state).__name__ == "PostLocalSGDState" for _, state in hooks
    )


def _window(trained: list[tuple[str, torch.nn.Parameter]], step: int) -> list[tuple[str, torch.nn.Parameter]]:
    """At most so many bytes of parameters, others each time."""
    sizes = [parameter.numel() * parameter.element_size() for _, parameter in trained]
    if sum(sizes) <= _MOST_BYTES:
        return trained
    begin = (
        step.bit_length() * len(trained) // 16 % len(trained)
        if step & (step - 1) == 0
        else step % len(trained)
    )
    chosen: list[tuple[str, torch.nn.Parameter]] = []
    held = 0
    for at in range(len(trained)):
        place = (begin + at) % len(trained)
        held += sizes[place]
        if chosen and held > _MOST_BYTES:
            break
        chosen.append(trained[place])
    return chosen


def _hashes(named: Iterable[tuple[str, torch.Tensor | None]]) -> list[str]:
    """Of runs of tensors: as many as the board should hold."""
    all_named = list(named)
    per = -(-len(all_named) // _MOST_BUCKETS) or 1
    found = []
    for first in range(0, len(all_named), per):
        digest = xxhash.xxh3_64()
        for _, tensor in all_named[first : first + per]:
            if tensor is None or tensor.is_sparse:
                digest.update(b"none")
            else:
                digest.update(raw_bytes(tensor))
        found.append(digest.hexdigest())
    return found


def _bucket_name(window: Sequence[tuple[str, object]], at: int) -> str:
    per = -(-len(window) // _MOST_BUCKETS) or 1
    first = window[at * per][0]
    return first if per == 1 else f"{first} or the {per - 1} after it"


def _first_difference(everyones: Sequence[Sequence[str]]) -> int | None:
    return next((at for at, values in enumerate(zip(*everyones, strict=True)) if len(set(values)) > 1), None)


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors_in([args, kwargs]):
        digest.update(raw_bytes(tensor)[:_MOST_INPUT_BYTES])
    return digest.hexdigest()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


@dataclass
class _Dice:
    """The states of torch's and numpy's random numbers."""

    torch_state: torch.Tensor
    numpy_mark: str

    @classmethod
    def now(cls) -> _Dice:
        """As they are."""
        numpy = sys.modules.get("numpy")
        state = b""
        if numpy is not None:
            _, words, position, *_ = numpy.random.get_state()
            state = words.tobytes() + str(position).encode()
        return cls(torch.get_rng_state(), xxhash.xxh3_64_hexdigest(state))

    @property
    def torch_mark(self) -> str:
        """A hash."""
        return xxhash.xxh3_64_hexdigest(raw_bytes(self.torch_state))

    def torch_drawn_since(self, before: _Dice) -> bool:
        """Whether anything was drawn but a few seeds, as a DataLoader does when it begins."""
        dice = torch.Generator()
        dice.set_state(before.torch_state)
        for _ in range(_SEEDS):
            if torch.equal(dice.get_state(), self.torch_state):
                return False
            torch.empty((), dtype=torch.int64).random_(generator=dice)
        return True
