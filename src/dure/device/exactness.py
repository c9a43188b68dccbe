"""The settings of torch that a device's bits depend on: set where one is right, and all of them told for the recipe."""

from __future__ import annotations

from typing import Any

import torch

from dure.device.accelerator import described, is_host


def compute_exactly(device: torch.device) -> None:
    """Once per process, before anything is computed on the device. The CPU's kernels need none of it.

    What a job or a script chose for TF32 stays: it is part of the recipe (`exactness_words`).
    """
    if is_host(device):
        return
    torch.use_deterministic_algorithms(True)
    # It fills what `empty` gives, so that reading it would be repeatable; nothing of ours reads it, and it costs a
    # kernel each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def exactness_words(device: torch.device) -> dict[str, Any]:
    """For the recipe: the device and its settings; {} on the CPU."""
    if is_host(device):
        return {}
    return {
        "accelerator": {
            **described(device),
            "benchmark": torch.backends.cudnn.benchmark,
            "tf32": _tf32(),
        }
    }


def _tf32() -> dict[str, str]:
    """How fp32 products are computed, by library; torch has two names for each of these settings."""
    places = {
        "products": getattr(torch.backends.cuda, "matmul", None),
        "convolutions": getattr(torch.backends.cudnn, "conv", None),
        "recurrent": getattr(torch.backends.cudnn, "rnn", None),
    }
    return {
        "matmul_precision": torch.get_float32_matmul_precision(),
        **{name: str(getattr(place, "fp32_precision", "")) for name, place in places.items()},
    }
