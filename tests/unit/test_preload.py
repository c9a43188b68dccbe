"""What is imported before the fork: only what the script imports before it does anything else."""

import subprocess
import sys

import pytest

from dure.launch import preload
from dure.launch.preloaded import late


def test_what_a_script_imports_first_is_imported_before_the_fork():
    source = """
'''A docstring.'''
from __future__ import annotations
import os, sys
import numpy as np
import torch.distributed as dist
from typing import TYPE_CHECKING
from accelerate import Accelerator
import transformers
from transformers import AutoModel, Trainer as T
VERSION = "1"
if TYPE_CHECKING:
    from mine import Thing
import lightning_fabric.plugins
"""
    assert preload.extra(source) == (
        "accelerate:Accelerator",
        "transformers",
        "transformers:AutoModel",
        "transformers:Trainer",
        "lightning_fabric.plugins",
    )


@pytest.mark.parametrize(
    "first",
    [
        "import os; os.environ['HF_HOME'] = '/x'",
        "import sys; sys.path.insert(0, 'mine')",
        "import warnings; warnings.filterwarnings('ignore')",
        "import mine",
        "from . import mine",
        "from .mine import thing",
        "try:\n    import os\nexcept ImportError:\n    pass",
        "x = f()",
        "if True:\n    import os",
    ],
)
def test_nothing_is_when_the_script_does_something_else_before(first):
    assert preload.extra(f"{first}\nimport transformers") == ()
    assert preload.extra(f"import accelerate\n{first}\nimport transformers") == ("accelerate",)


@pytest.mark.parametrize("source", ["import transformers as", "\0", "", "def f(:", "(" * 5000])
def test_a_script_that_cannot_be_parsed_is_left_to_the_ranks(source):
    assert preload.extra(source) == ()


def test_what_ddp_needs_is_imported_for_a_script_that_names_it():
    assert preload.base("from torch.nn.parallel import DistributedDataParallel") == preload.TORCH_WITH_DDP
    assert preload.base("import torch") == preload.TORCH


def test_only_variables_that_a_package_reads_at_its_import_come_too_late():
    before = {"OMP_NUM_THREADS": "1", "KMP_AFFINITY": "x"}
    now = {
        "OMP_NUM_THREADS": "4",  # changed; KMP_AFFINITY is gone
        "TORCH_LOGS": "+dynamo",
        "TORCH_HOME": "/x",  # read when it is needed
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/x",
        "OPENBLAS_NUM_THREADS": "4",
    }
    assert late("torch", before, now) == {
        "OMP_NUM_THREADS": "4",
        "KMP_AFFINITY": None,
        "TORCH_LOGS": "+dynamo",
    }
    assert late("numpy", before, now) == {"OPENBLAS_NUM_THREADS": "4"}
    assert late("transformers", before, now) == {}


def test_no_random_state_is_preloaded_but_what_ranks_renew():
    """A package that makes a generator of its own when it is imported would give all ranks the same numbers."""
    code = """if True:
        import _random, gc, importlib, random, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
        import numpy, sympy.core.random, sympy.core.symbol, torch
        kinds = (_random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
        known = [
            random._inst, numpy.random.mtrand._rand, torch.default_generator,
            sympy.core.random.rng, sympy.core.random._assumptions_rng, sympy.core.symbol.Dummy._prng,
        ]
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
        found += [
            value for module in list(sys.modules.values()) for value in list(vars(module).values())
            if issubclass(type(value), kinds)
        ]
        for thing in found:
            if not isinstance(thing, random.SystemRandom) and not any(thing is other for other in known):
                sys.exit(f"{type(thing)}: {gc.get_referrers(thing)}"[:2000])
    """
    names = [*preload.TORCH_WITH_DDP, "accelerate", "transformers", "lightning_fabric", "safetensors"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
