"""Fingerprints of each shard's gradients, taken before they meet: for the run's receipt.

A step's fingerprints are over a window of the parameters that moves from step to step, so that they cost the same for
every model; the window depends on the step and the shapes alone. What differs outside of it shows in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from dure.device.fingerprint import raw_bytes

_MOST_TENSORS = 8
_MOST_BYTES = 1 << 20
_HALF, _MASK = (1 << 32) - 1, (1 << 64) - 1


class Windows:
    """Which parts of which parameters are looked at, by step."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._groups: list[list[tuple[int, int, int]]] = [[]]
        held = 0
        for at, parameter in enumerate(self._parameters):
            most = max(_MOST_BYTES // parameter.element_size(), 1)
            for start in range(0, max(parameter.numel(), 1), most):
                stop = min(start + most, parameter.numel())
                nbytes = (stop - start) * parameter.element_size()
                if self._groups[-1] and (
                    len(self._groups[-1]) == _MOST_TENSORS or held + nbytes > _MOST_BYTES
                ):
                    self._groups.append([])
                    held = 0
                self._groups[-1].append((at, start, stop))
                held += nbytes

    def of_step(self, step: int) -> list[tuple[int, int, int]]:
        """(position, first element, end) of what is looked at."""
        return self._groups[step % len(self._groups)]

    def marks(self, step: int, shards: int, content: int) -> GradientMarks:
        """For one step on this rank; `content` is the hash of what its samples contain."""
        window = {id(self._parameters[at]): (at, start, stop) for at, start, stop in self.of_step(step)}
        return GradientMarks(window, shards, content)


class GradientMarks:
    """One step's fingerprints: this rank's at first, everyone's after `take`."""

    def __init__(self, window: dict[int, tuple[int, int, int]], shards: int, content: int) -> None:
        self._window = window
        self._found: dict[int, dict[int, int]] = {}
        self.content = content
        """Hash of what the samples contain; ranks' own add up."""
        self.gradients = [0] * shards
        """By shard."""

    def wants(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The positions of those that are looked at in this step."""
        return [at for at, parameter in enumerate(parameters) if id(parameter) in self._window]

    def note(
        self, shard: int, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Look at some of a shard's gradients, before anything is added to them; None stands for zeros."""
        found = self._found.setdefault(shard, {})
        for parameter, gradient in zip(parameters, gradients, strict=True):
            wanted = self._window.get(id(parameter))
            if wanted is None:
                continue
            at, start, stop = wanted
            values = torch.zeros_like(parameter) if gradient is None else gradient
            window = values.detach().contiguous().view(-1)[start:stop]  # only that crosses over from a device
            found[at] = xxhash.xxh3_64_intdigest(raw_bytes(window))

    def as_vector(self, numbers: int) -> torch.Tensor:
        """So many numbers; every rank fills its own shards' places. A hash comes in two halves."""
        for shard, found in self._found.items():
            joined = b"".join(found[at].to_bytes(8, "little") for at in sorted(found))
            self.gradients[shard] = xxhash.xxh3_64_intdigest(joined)
        halves = [half for one in (*self.gradients, self.content) for half in (one >> 32, one & _HALF)]
        return torch.tensor(halves + [0] * (numbers - len(halves)), dtype=torch.float64)

    def take(self, vector: torch.Tensor) -> None:
        """What all ranks have found."""
        told = [int(number) for number in vector.tolist()]
        joined = [((high << 32) + low) & _MASK for high, low in zip(told[::2], told[1::2], strict=False)]
        self.gradients, self.content = joined[: len(self.gradients)], joined[len(self.gradients)]
