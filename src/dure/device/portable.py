"""What else portable arithmetic takes, besides the kernels that the environment chooses.

On Intel's CPUs torch takes `bernoulli_`, and so dropout's masks, and `exponential_` from MKL's generators; elsewhere
from its own. Here `bernoulli_` is drawn from torch's own uniform numbers, with the bits that it has without MKL.
"""

from __future__ import annotations

import functools
import warnings
from typing import NoReturn

import torch

from dure.base.errors import ModelRefused
from dure.device.accelerator import is_host


@functools.cache
def compute_portably() -> torch.library.Library:
    """For as long as this process lives: replace torch's CPU kernels of those draws, and run compiled models as eager
    code, as the compiler makes code for this CPU's instructions."""
    torch.compiler.set_stance("force_eager")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that a kernel is replaced
        library.impl("bernoulli_.float", _bernoulli, "CPU", allow_override=True)
        library.impl("exponential_", _refuse_exponential, "CPU", allow_override=True)
    return library


def _bernoulli(
    self: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    uniform = torch.empty_like(self, dtype=torch.float64).uniform_(generator=generator)
    return self.copy_(uniform < p)


def _refuse_exponential(_self: torch.Tensor, *_arguments: object, **_options: object) -> NoReturn:
    raise ModelRefused(
        "exponential_ (also in multinomial and gumbel_softmax) gives other bits on other vendors' CPUs, so it cannot "
        'be used with arithmetic = "portable"; draw -torch.log1p(-torch.rand(...)) instead'
    )


def why_not_portable(device: torch.device, precision: str) -> str:
    """What here cannot be the same bits on other kinds of CPU; "" when nothing is known to stand against it."""
    if not is_host(device):
        return f"it is about kinds of CPUs, and the device is {device.type}; use native"
    if precision != "fp32":
        return f"{precision} takes other kernels on other CPUs; use precision fp32, or native"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX2":
        return f"torch computes with {capability} here, not with AVX2; the CPU must be an x86-64 with AVX2"
    return ""
