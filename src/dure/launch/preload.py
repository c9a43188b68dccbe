"""What to import before ranks are forked, read from the script that they will run. Pure: nothing is imported here."""

from __future__ import annotations

import ast
import sys

# DistributedDataParallel imports torch._dynamo when it is first made, an optimizer and `dure.start` do so too: half a
# second of a core for each rank of a script that has to do it by itself. Ranks of `dure train` go without
# (`base/dynamo_on_demand.py`).
TORCH = ("torch", "torch.distributed", "torch.nn.parallel", "numpy")
TORCH_WITH_DDP = (*TORCH, "torch._dynamo")

_USES_DDP = ("DistributedDataParallel", "import dure", "accelerate", "lightning", "transformers")

_PRELOADED = frozenset({
    "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "safetensors", "sentence_transformers",
    "torchvision", "transformers",
})  # fmt: skip
"""Packages that take long to import, start no threads when they are, and read no rank's variables."""
_HARMLESS = frozenset({
    "PIL", "datasets", "dure", "einops", "evaluate", "huggingface_hub", "matplotlib", "mlflow", "numpy", "omegaconf",
    "packaging", "pandas", "regex", "requests", "rich", "scipy", "sklearn", "tensorboard", "tokenizers", "torch",
    "torchaudio", "torchmetrics", "tqdm", "wandb", "yaml",
})  # fmt: skip
"""Packages whose import does not change what a later import of one of the above does."""


def base(source: str) -> tuple[str, ...]:
    """What every script of `dure run` needs: what DDP does takes a second, for a script that uses it."""
    return TORCH_WITH_DDP if any(word in source for word in _USES_DDP) else TORCH


def extra(source: str) -> tuple[str, ...]:
    """Return what else to import: `package.module`, or `package.module:name` where names are made on demand.

    Only what the script imports first of all: whatever it does before an import (sets a variable, changes the path or
    the warnings, imports a module of its own that might) could change what that import does, so that all that follows
    is left to the script.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):  # the ranks will say it
        return ()
    found: dict[str, None] = {}
    for statement in body:
        if not _take(statement, found):
            break
    return tuple(found)


def _take(statement: ast.stmt, found: dict[str, None]) -> bool:
    """Note what a statement imports; returns whether it is known to do nothing else."""
    match statement:
        case ast.Import(names):
            return all(_note(name.name, None, found) for name in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return all(_note(module, name.name, found) for name in names)
        case ast.Expr(ast.Constant()) | ast.Assign([ast.Name()], ast.Constant()) | ast.Pass():
            return True
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
            return True
    return False


def _note(module: str, name: str | None, found: dict[str, None]) -> bool:
    package = module.partition(".")[0]
    if package in _PRELOADED:
        found[module if name in (None, "*") else f"{module}:{name}"] = None
        return True
    return package in _HARMLESS or package in sys.stdlib_module_names
