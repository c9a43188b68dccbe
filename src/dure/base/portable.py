"""Portable arithmetic: the environment in which x86-64 CPUs with AVX2, of whatever vendor, compute the same bits.

Libraries read these variables when they are loaded or first used, so they must be there before torch is imported: the
launcher puts them into the environment of the process that ranks are forked from.
"""

from __future__ import annotations

from collections.abc import Mapping

PORTABLE_KERNELS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""torch's own kernels, MKL's and oneDNN's. None of them alone is enough."""
_WOULD_CHANGE_KERNELS = (
    "DNNL_MAX_CPU_ISA",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)


def launch_environment(arithmetic: str) -> dict[str, str | None]:
    """What ranks of this `team.arithmetic` find in their environment; None: nothing of that name."""
    if arithmetic != "portable":
        return {}
    return {**PORTABLE_KERNELS, **dict.fromkeys(_WOULD_CHANGE_KERNELS)}


def not_portable(environment: Mapping[str, str]) -> list[str]:
    """What an environment lacks for portable arithmetic, as `NAME=value`."""
    return [f"{name}={value}" for name, value in PORTABLE_KERNELS.items() if environment.get(name) != value]
