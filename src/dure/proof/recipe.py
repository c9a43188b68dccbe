"""The recipe: all that the bits depend on, hashed. Same recipe, same bits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from dure.config import LoadedJob
from dure.device.exactness import exactness_words

_NOT_TRAINED_BY = {
    "name",
    "storage",
    "hooks",
    "eval",
    "checkpoint",
    "log",
    "cluster",
    "slurm",
    "ray",
    "kubernetes",
}
_NOT_IN_THE_BITS = {
    "model": ("weights", "load", "strict"),
    "data": ("workers",),
    "train": (
        "prove_every",
        "receipt_every",
        "audit",
        "on_corruption",
        "epochs",
        "steps",
        "shard_optimizer",
        "ema",
    ),
    "team": ("ranks", "min_ranks", "arithmetic", "hang_seconds", "stop_seconds", "max_restarts"),
    "reduce": ("transport",),
}
"""Settings that change how long, how fast or how closely watched a run is, never a bit of a step."""


_KERNELS_BY = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""Environment variables by which libraries choose kernels, behind torch's back."""


def recipe_of(
    loaded: LoadedJob,
    device: torch.device,
    samples: int,
    code: Mapping[str, str],
    arithmetic: Mapping[str, str],
    first_samples: str,
    weights: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that decides the weights after step n, in words.

    `code` are the digests of the user's own files (`factory.own_code`), `arithmetic` what this machine computes
    (`arithmetic_fingerprint`), `first_samples` the fingerprint of the run's first samples; what the others contain is
    compared as they are read (`SampleContents`). `weights` is what tells loaded weights
    from others, wherever they lie and whoever read them.
    """
    job = loaded.job.model_dump(mode="json", exclude=_NOT_TRAINED_BY)
    for section, keys in _NOT_IN_THE_BITS.items():
        for key in keys:
            del job[section][key]
    if not loaded.job.team.sync:
        job["team"]["ranks"] = loaded.job.team.ranks
    return {
        "job": job,
        "code": dict(sorted(code.items())),
        **({"weights": dict(weights)} if weights is not None else {}),
        "samples": samples,
        "first_samples": first_samples,
        "arithmetic": dict(arithmetic),
        **machine_words(device),
    }


def machine_words(device: torch.device) -> dict[str, Any]:
    """What of the bits depends on this machine and on torch, whatever is trained."""
    return {
        "torch": torch.__version__,
        "device": device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "blas": _blas(),
        "kernels": {name: os.environ[name] for name in _KERNELS_BY if name in os.environ},
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        **exactness_words(device),
    }


def recipe_hash(recipe: dict[str, Any]) -> str:
    """sha256 of the recipe's canonical JSON."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _blas() -> list[bool]:
    return [
        torch.backends.mkl.is_available(),
        torch.backends.mkldnn.is_available(),
        torch.backends.openmp.is_available(),
    ]
