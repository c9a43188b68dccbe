"""The variables that pass into an image: those that say who a rank is and how it talks; nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dure.base.in_image import IN_IMAGE
from dure.device.words import ENVIRONMENT_PREFIXES
from dure.image.contents import HOME

_PREFIXES = (
    "DURE_", "GLOO_", "SLURM_", "MASTER_", "TORCH_", "TORCHELASTIC_", "AWS_", *ENVIRONMENT_PREFIXES,
)  # fmt: skip
"""AWS_: without them a bucket as storage could not be reached from inside."""
_NAMES = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "ATEN_CPU_CAPABILITY", "PYTHONHASHSEED", "PYTHONUNBUFFERED",
    "SOURCE_DATE_EPOCH", "TERM", "COLUMNS", "NO_COLOR", "LANG", "LC_ALL", "TZ",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def passed(environ: Mapping[str, str], digest: str) -> dict[str, str]:
    """What the command inside gets, of what is set outside, and what the image itself needs."""
    kept = {
        name: value
        for name, value in sorted(environ.items())
        if _NAME.fullmatch(name) and (name in _NAMES or name.startswith(_PREFIXES))
    }
    return {"LANG": "C.UTF-8", **kept, IN_IMAGE: digest}


def complete(environment: Mapping[str, str], temporary: str = "/tmp") -> dict[str, str]:
    """With what an image of ours defines by itself, for the runner that has no /etc/environment."""
    return {"PATH": f"{HOME}/bin:/usr/bin:/bin", "HOME": temporary, "TMPDIR": temporary, **environment}
