"""Small operations, run to see which bits this machine's kernels give.

MKL and oneDNN choose kernels by CPU vendor and instruction set, torch by instruction set, and none of their flags says
what was chosen. So the operations are run, on inputs that every machine makes alike, and their results are hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dure.device.accelerator import draws_kept
from dure.device.fingerprint import fingerprint

Results = list[torch.Tensor]
Operation = Callable[[], Results]

_VALUES = 1 << 18
_UNSUPPORTED = "not supported"
_MATMULS = (
    (1, 64, 64), (4, 32, 10), (5, 17, 3), (8, 128, 128), (16, 64, 256), (32, 512, 64), (64, 64, 64), (128, 300, 96),
    (7, 1000, 33), (192, 768, 64),
)  # fmt: skip
"""Rows, inner size, columns: libraries have kernels of their own for thin, small and blocked products."""
_CONVOLUTIONS: tuple[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, int]], ...] = (
    ("conv1d", (2, 8, 40), (16, 8, 3), {"padding": 1}),
    ("conv2d 1x1", (2, 32, 8, 8), (16, 32, 1, 1), {}),
    ("conv2d 3x3", (2, 3, 16, 16), (8, 3, 3, 3), {"padding": 1}),
    ("conv2d 3x3 stride 2", (3, 16, 12, 12), (32, 16, 3, 3), {"stride": 2}),
    ("conv2d 5x5", (2, 4, 20, 20), (6, 4, 5, 5), {}),
    ("conv2d depthwise", (2, 8, 10, 10), (8, 1, 3, 3), {"groups": 8}),
)
_ELEMENTWISE = (
    "exp", "erf", "tanh", "log", "sin", "cos", "sigmoid", "rsqrt", "sqrt", "log1p", "expm1", "reciprocal",
)  # fmt: skip


class Battery:
    """The operations in one dtype on one device, by name."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        # Whole numbers below 2**24 divided by a power of two: exact in fp32, whatever instructions do it.
        at = torch.arange(_VALUES, dtype=torch.int64)
        mixed = (at * 1103515245 + (at >> 3) * 2654435761 + 12345) & 0xFFFFFFFF
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
        whole = ((mixed ^ (mixed >> 12)) & 0xFFFFFF).to(torch.float32)
        self._values = (whole * 2.0**-23 - 1.0).to(dtype).to(device)

    def run(self) -> dict[str, str]:
        """Fingerprints of the results, by the operation's name. The global generators are left as they were."""
        found = {}
        with draws_kept(self._device), torch.enable_grad():
            for name, operation in self._operations():
                try:
                    found[name] = fingerprint(("", result) for result in operation())
                except (
                    RuntimeError,
                    NotImplementedError,
                ):  # not there for this dtype: alike where it is alike
                    found[name] = _UNSUPPORTED
        return found

    def _operations(self) -> Iterator[tuple[str, Operation]]:
        yield from self._products()
        yield from self._layers()
        yield from self._reductions()
        yield from self._draws()
        yield from self._updates()
        yield from self._moves()

    def _products(self) -> Iterator[tuple[str, Operation]]:
        v = self._v

        def matmul(m: int, k: int, n: int, turned: str) -> Results:
            left = v(k, m).t() if turned[0] == "T" else v(m, k)
            right = v(n, k, at=77).t() if turned[1] == "T" else v(k, n, at=77)
            return [left @ right]

        for m, k, n in _MATMULS:
            for turned in ("NN", "NT", "TN", "TT"):
                yield f"matmul {m}x{k}x{n} {turned}", partial(matmul, m, k, n, turned)
        yield "bmm", lambda: [torch.bmm(v(4, 16, 32), v(4, 32, 24, at=5))]
        yield "mv", lambda: [v(64, 200) @ v(200, at=5)]
        yield "dot", lambda: [torch.dot(v(999), v(999, at=5))]
        yield "linear", lambda: self._with_gradients(F.linear, v(6, 40), v(24, 40, at=5), v(24, at=9))

    def _layers(self) -> Iterator[tuple[str, Operation]]:
        v, both = self._v, self._with_gradients

        def convolution(shape: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, int]) -> Results:
            function = F.conv1d if len(shape) == 3 else F.conv2d
            return both(partial(function, **options), v(*shape), v(*kernel, at=5), v(kernel[0], at=9))

        for name, shape, kernel, options in _CONVOLUTIONS:
            yield name, partial(convolution, shape, kernel, options)

        def batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.batch_norm(x, torch.zeros_like(weight), torch.ones_like(weight), weight, bias, True)

        def attention(causal: bool) -> Results:
            function = partial(F.scaled_dot_product_attention, is_causal=causal)
            return both(function, v(2, 4, 24, 16), v(2, 4, 24, 16, at=5), v(2, 4, 24, 16, at=9))

        images, wide = (3, 8, 5, 5), (37, 129)
        yield "batch_norm", lambda: both(batch_norm, v(*images), v(8, at=5), v(8, at=9))
        yield (
            "group_norm",
            lambda: both(lambda x, w, b: F.group_norm(x, 4, w, b), v(*images), v(8, at=5), v(8, at=9)),
        )
        yield (
            "layer_norm",
            lambda: both(lambda x, w, b: F.layer_norm(x, (129,), w, b), v(*wide), v(129, at=5), v(129, at=9)),
        )
        for dim in (0, 1):
            yield f"softmax dim {dim}", partial(both, partial(F.softmax, dim=dim), v(*wide))
        yield "log_softmax", lambda: both(partial(F.log_softmax, dim=1), v(*wide))
        yield "gelu", lambda: both(F.gelu, v(*wide))
        yield "silu", lambda: both(F.silu, v(*wide))
        yield "scaled_dot_product_attention", partial(attention, False)
        yield "scaled_dot_product_attention causal", partial(attention, True)
        yield "adaptive_avg_pool2d", lambda: both(lambda x: F.adaptive_avg_pool2d(x, 3), v(2, 4, 12, 12))
        yield (
            "interpolate",
            lambda: both(lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), v(2, 4, 12, 12)),
        )

    def _reductions(self) -> Iterator[tuple[str, Operation]]:
        def x() -> torch.Tensor:
            return self._v(37, 129)

        yield "sum", lambda: [x().sum(), x().sum(0), x().sum(1)]
        yield "mean", lambda: [x().mean(), x().mean(0), x().mean(1)]
        yield "var", lambda: [x().var(), x().var(0), x().var(1)]
        yield "norm", lambda: [x().norm(), x().norm(dim=0)]
        yield "cumsum", lambda: [x().cumsum(0), x().cumsum(1)]
        yield "logsumexp", lambda: [x().logsumexp(1)]
        for name in _ELEMENTWISE:
            yield name, partial(self._elementwise, name)
        yield "pow", lambda: [self._v(1003).abs() ** 1.7]

    def _elementwise(self, name: str) -> Results:
        return [getattr(torch, name)(self._v(1003).abs() * 3)]

    def _draws(self) -> Iterator[tuple[str, Operation]]:
        where: dict[str, Any] = {"dtype": self._dtype, "device": self._device}

        def seeded(draw: Operation) -> Operation:
            def drawn() -> Results:
                torch.manual_seed(7)
                return draw()

            return drawn

        yield "normal", seeded(lambda: [torch.randn(7, **where), torch.randn(1003, **where)])
        yield "uniform", seeded(lambda: [torch.rand(7, **where), torch.rand(1003, **where)])
        yield (
            "dropout",
            seeded(
                lambda: [
                    F.dropout(torch.ones(1003, **where), 0.1),
                    F.dropout(torch.ones((5, 7), **where), 0.5),
                ]
            ),
        )
        yield "randperm", seeded(lambda: [torch.randperm(1003, device=self._device)])

    def _updates(self) -> Iterator[tuple[str, Operation]]:
        def updated(kind: Any, **options: Any) -> Results:
            parameter = torch.nn.Parameter(self._v(1003))
            optimizer = kind([parameter], lr=0.01, **options)
            for step in range(2):
                parameter.grad = self._v(1003, at=step + 3)
                optimizer.step()
            return [parameter]

        yield "AdamW fused", partial(updated, torch.optim.AdamW, fused=True)
        yield "AdamW foreach", partial(updated, torch.optim.AdamW, foreach=True)
        yield "Adagrad fused", partial(updated, torch.optim.Adagrad, fused=True)
        yield "SGD fused", partial(updated, torch.optim.SGD, momentum=0.9, fused=True)

    def _moves(self) -> Iterator[tuple[str, Operation]]:
        v = self._v

        def index() -> torch.Tensor:
            return (v(500).float().abs() * 30).long()

        def tied() -> torch.Tensor:
            return (v(37, 129) * 8).round()

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)

        yield "sort", lambda: list(torch.sort(tied(), dim=1))
        yield "topk", lambda: list(torch.topk(tied(), 5, dim=1))
        yield "scatter_add", lambda: [zeros(31).scatter_add_(0, index(), v(500))]
        yield "index_add", lambda: [zeros(31, 8).index_add_(0, index(), v(500, 8))]
        yield "embedding", lambda: self._with_gradients(lambda w: F.embedding(index(), w), v(31, 8))
        yield "max_pool2d", lambda: self._with_gradients(lambda x: F.max_pool2d(x, 2), v(2, 4, 12, 12))

    def _v(self, *shape: int, at: int = 0) -> torch.Tensor:
        """A copy of some of the values; `at` chooses others."""
        count = torch.Size(shape).numel()
        return self._values[at : at + count].clone().reshape(shape)

    def _with_gradients(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Results:
        """What a function gives, and its gradients by all inputs."""
        for tensor in inputs:
            tensor.requires_grad_()
        result = function(*inputs)
        return [result, *torch.autograd.grad(result, inputs, self._v(*result.shape, at=13))]
