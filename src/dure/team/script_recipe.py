"""The recipe of a script: all that its bits depend on, as far as it can be known."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dure.base.errors import UsageError
from dure.config.factory import loaded_code
from dure.proof.recipe import machine_words

if TYPE_CHECKING:
    from dure.team.team import Team

_PLAIN = (bool, int, float, str, type(None))


def script_recipe(team: Team, wire: str, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """The script and what it imports from its own folder, the team's settings, the optimizers', and the machine's.
    Ranks whose recipe is another are refused. A collective call.

    Arguments of the script are not in it: most of them change how long it trains, or where it saves.
    """
    setting = team.setting
    recipe = {
        "code": _code(team),
        "team": {
            "seed": setting.seed,
            "shards": setting.shards,
            "threads": team.threads,
            "precision": setting.precision,
            "wire": wire,
        },
        "optimizer": [
            {"kind": type(optimizer).__name__, **_plain(optimizer.defaults)} for optimizer in optimizers
        ],
        **machine_words(setting.device),
    }
    team.agree(recipe)
    return recipe


def _code(team: Team) -> dict[str, str]:
    """Of all ranks: some files may be imported by one of them only."""
    folder = _folder()
    found: dict[str, str] = {}
    own = loaded_code(folder) if folder is not None else {}
    for rank, text in enumerate(team.group.gather(json.dumps(own), "comparing code")):
        for name, digest in json.loads(text).items():
            if found.setdefault(name, digest) != digest:
                raise UsageError(
                    f"{name} has other content on rank {rank} than on the ranks before; make them the same"
                )
    return found


def _folder() -> Path | None:
    """The folder of the script; of a module (-m), that of its package. None for code that is in no file."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if not isinstance(path, str):
        return None
    package = getattr(getattr(main, "__spec__", None), "parent", "") or ""
    depth = len(package.split(".")) if package else 0
    return Path(os.path.realpath(path)).parents[depth]


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Those that words can tell; an lr that is a tensor is compared by its state."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in settings.items()
        if isinstance(value, _PLAIN)
        or (isinstance(value, list | tuple) and all(isinstance(one, _PLAIN) for one in value))
    }
