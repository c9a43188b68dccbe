"""Private names of other packages: each is listed with its reason, and each still is what dure takes it for."""

import ast
import atexit
import importlib
import multiprocessing.process
import multiprocessing.util
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dure
from dure.base.private_names import PRIVATE_NAMES

SOURCE = Path(dure.__file__).parent
OTHERS = {
    "torch",
    "transformers",
    "numpy",
    "accelerate",
    "typer",
    "rich",
    "pydantic",
    "runpy",
    "atexit",
    "sympy",
}
DOCUMENTED = {"_replace", "_fields", "_exit", "_getframe", "_fields_"}
"""Public in spite of their spelling: named tuples', os's, sys's, ctypes's."""
PRIVATE = re.compile(r"_[A-Za-z]\w*")


def is_private(name):
    return PRIVATE.fullmatch(name) is not None and not name.endswith("__") and name not in DOCUMENTED


def own_names(trees):
    """Private names that dure itself defines: functions, classes, variables, attributes of its own objects."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "sys"):
                found.add(node.attr)
    return found


def foreign_names(tree, own):
    """The private names in one module that dure does not define: by import, by attribute, by a text that names one."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OTHERS:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if any(map(is_private, a.name.split("."))))
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            text = ast.unparse(node)
            if text.split(".")[0] in OTHERS and any(map(is_private, text.split("."))):
                yield text
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and owner.split(".")[0] not in OTHERS:
                yield f".{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in own:
                yield f".{name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            is_name = (
                re.fullmatch(r"[\w.]+", node.value) and parts[0] in OTHERS and any(map(is_private, parts))
            )
            if is_name or node.value.startswith("_c10d"):
                yield node.value


def used_names():
    trees = {
        path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py") if path.name != "private_names.py"
    }
    own = own_names(trees.values()) - {entry.name.removeprefix(".") for entry in PRIVATE_NAMES}
    return {name: path for path, tree in trees.items() for name in foreign_names(tree, own)}


def test_every_private_name_of_another_package_is_listed_with_its_reason():
    listed = {entry.name for entry in PRIVATE_NAMES}
    unlisted = {
        name: str(path.relative_to(SOURCE)) for name, path in used_names().items() if name not in listed
    }
    assert not unlisted, "use a public name, or list it in base/private_names.py, and give it a canary here"


def test_no_name_is_listed_that_nothing_uses():
    assert {entry.name for entry in PRIVATE_NAMES} - set(used_names()) == set()


def test_a_private_name_would_be_found():
    code = "torch._foreach_mul_\nt._hidden\ngetattr(t, '_other')\nfrom torch._C import _get\nself._own"
    found = set(foreign_names(ast.parse(code), {"_own"}))
    assert found == {"torch._foreach_mul_", "._hidden", "._other", "torch._C._get"}


def _share_fd():
    storage = torch.ones(3).share_memory_().untyped_storage()
    descriptor, nbytes = storage._share_fd_cpu_()
    return descriptor >= 0 and nbytes >= 12


def _checkpoint_offset(tmp_path):
    torch.save({"x": torch.arange(5)}, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", map_location="meta", weights_only=True)["x"]
    at = found.untyped_storage()._checkpoint_offset
    return (tmp_path / "x.pt").read_bytes()[at : at + 40] == torch.arange(5).numpy().tobytes()


def _version():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    return tensor._version == before + 1


def _foreach(call, expected):
    into = [torch.ones(2), torch.ones(3)]
    call(into, [torch.full((2,), 2.0), torch.full((3,), 2.0)])
    return all(bool((tensor == expected).all()) for tensor in into)


def _module():
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("extra", torch.ones(1), persistent=False)
    module.child = torch.nn.Identity()
    return module


def _dispatch_mode():
    seen = []

    class Mode(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1) + 1
    return "aten" in seen


def _dynamo_config():
    config = importlib.import_module("torch._dynamo.config")
    return hasattr(config, "automatic_dynamic_shapes") and hasattr(config, "fail_on_recompile_limit_hit")


def _compiled_wrapper():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of itself when its compiler is imported
        return hasattr(torch.compile(torch.nn.Identity(), backend="eager"), "_orig_mod")


def _pretrained(name):
    transformers = pytest.importorskip("transformers")
    return callable(getattr(transformers.PreTrainedModel, name, None))


def _hf_initialized(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    weight = model.transformer.h[0].attn.c_attn.weight
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = True
    with torch.no_grad():
        weight.fill_(3.0)
    model.initialize_weights()
    return bool((weight == 3.0).all())


def _socket_folder(tmp_path):
    config = multiprocessing.process.current_process()._config
    before = config.get("tempdir")
    config["tempdir"] = str(tmp_path)
    try:
        return multiprocessing.util.get_temp_dir() == str(tmp_path)
    finally:
        config["tempdir"] = before


def _sympy(module, owner, name):
    found = importlib.import_module(module)
    return hasattr(getattr(getattr(found, owner) if owner else found, name), "seed")


def _same_as_public(name):
    return getattr(importlib.import_module("torch._C._distributed_c10d"), name) is getattr(dist, name)


def _comm_hooks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        state = object()
        model.register_comm_hook(state, allreduce_hook)
        return [own for _, own in model._comm_hooks] == [state]
    finally:
        dist.destroy_process_group()


def test_distributed_sampler_reads_an_epoch_by_its_iter_and_is_told_it_by_set_epoch():
    """The canary of what is put in front of the two (proof/detectors/samplers.py)."""
    sampler = torch.utils.data.DistributedSampler(range(7), num_replicas=2, rank=1, seed=3)
    assert {"__iter__", "set_epoch"} <= set(vars(torch.utils.data.DistributedSampler))
    facts = (
        sampler.seed,
        sampler.epoch,
        sampler.shuffle,
        sampler.num_replicas,
        sampler.rank,
        sampler.drop_last,
    )
    assert facts == (3, 0, True, 2, 1, False)
    assert (sampler.num_samples, sampler.total_size) == (4, 8)
    first = list(sampler)
    sampler.set_epoch(5)
    assert (sampler.epoch, list(sampler) != first) == (5, True)


def _join_config():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        before = model._join_config.enable
        with model.join():
            return not before and model._join_config.enable
    finally:
        dist.destroy_process_group()


def _around_forward():
    """What DDP does around its forward pass, done around a module's own: the reducer takes the backward pass."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        met = []
        model.register_comm_hook(None, lambda _, bucket: met.append(bucket) or _done(bucket.buffer()))
        model._pre_forward()
        loss = model.module(torch.ones(1, 1)).sum()
        model._post_forward(loss)
        loss.backward()
        return len(met) == 1
    finally:
        dist.destroy_process_group()


def _inside_forward():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        with model._inside_ddp_forward():
            return type(model)._active_ddp_module is model
    finally:
        dist.destroy_process_group()


def _hooks_on_sums():
    parameter = torch.nn.Parameter(torch.ones(2))
    before = not parameter._post_accumulate_grad_hooks
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    return before and len(parameter._post_accumulate_grad_hooks) == 1


def _scale_and_look():
    """The bits of a plain multiplication, and a mark where a number is none."""
    values, found = torch.randn(1000), torch.zeros(1)
    for scale in (1.0, 0.3, 1 / 3):
        mine = values.clone()
        torch._amp_foreach_non_finite_check_and_unscale_([mine], found, torch.tensor(scale))
        if found.item() or not torch.equal(mine, values * scale):
            return False
    for bad in (float("nan"), float("inf"), -float("inf")):
        found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_([torch.tensor([1.0, bad])], found, torch.ones(1))
        if not found.item():
            return False
    return True


def _done(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


CANARIES = {
    **{
        f"torch._C._distributed_c10d.{name}": lambda tmp_path, name=name: _same_as_public(name)
        for name in ("Store", "HashStore", "PrefixStore", "TCPStore", "GradBucket")
    },
    "torch._foreach_add_": lambda tmp_path: _foreach(torch._foreach_add_, 3.0),
    "torch._foreach_mul_": lambda tmp_path: _foreach(torch._foreach_mul_, 2.0),
    "torch._amp_foreach_non_finite_check_and_unscale_": lambda tmp_path: _scale_and_look(),
    "torch._foreach_copy_": lambda tmp_path: _foreach(torch._foreach_copy_, 2.0),
    "torch.utils._python_dispatch.TorchDispatchMode": lambda tmp_path: _dispatch_mode(),
    "torch._dynamo.config": lambda tmp_path: _dynamo_config(),
    "torch._dynamo": lambda tmp_path: importlib.import_module("torch._dynamo") is not None,
    "torch._dynamo.eval_frame": lambda tmp_path: (
        _compiled_wrapper() and "torch._dynamo.eval_frame" in sys.modules
    ),
    "._version": lambda tmp_path: _version(),
    "._share_fd_cpu_": lambda tmp_path: _share_fd(),
    "._pg_map": lambda tmp_path: type(dist.distributed_c10d._pg_map).__mro__[-2] is dict,
    "torch._C._dynamo.eval_frame": lambda tmp_path: callable(
        torch._C._dynamo.eval_frame.set_code_exec_strategy
    ),
    "._FrameExecStrategy": lambda tmp_path: hasattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy"),
    "._FrameAction": lambda tmp_path: hasattr(torch._C._dynamo.eval_frame._FrameAction, "SKIP"),
    "._join_config": lambda tmp_path: _join_config(),
    "._comm_hooks": lambda tmp_path: _comm_hooks(),
    "._pre_forward": lambda tmp_path: _around_forward(),
    "._post_forward": lambda tmp_path: _around_forward(),
    "._post_accumulate_grad_hooks": lambda tmp_path: _hooks_on_sums(),
    "._inside_ddp_forward": lambda tmp_path: _inside_forward(),
    "._checkpoint_offset": _checkpoint_offset,
    "._orig_mod": lambda tmp_path: _compiled_wrapper(),
    "._parameters": lambda tmp_path: set(_module()._parameters) == {"weight", "bias"},
    "._buffers": lambda tmp_path: "extra" in _module()._buffers,
    "._modules": lambda tmp_path: set(_module()._modules) == {"child"},
    "._non_persistent_buffers_set": lambda tmp_path: _module()._non_persistent_buffers_set == {"extra"},
    "_c10d_functional": lambda tmp_path: hasattr(torch.ops._c10d_functional, "all_reduce"),
    "._adjust_missing_and_unexpected_keys": lambda tmp_path: _pretrained(
        "_adjust_missing_and_unexpected_keys"
    ),
    "._get_dtype_plan": lambda tmp_path: _pretrained("_get_dtype_plan"),
    "._is_hf_initialized": _hf_initialized,
    "._config": _socket_folder,
    "runpy._run_module_as_main": lambda tmp_path: callable(runpy._run_module_as_main),
    "atexit._run_exitfuncs": lambda tmp_path: callable(atexit._run_exitfuncs),
    "._assumptions_rng": lambda tmp_path: _sympy("sympy.core.random", "", "_assumptions_rng"),
    "._prng": lambda tmp_path: _sympy("sympy.core.symbol", "Dummy", "_prng"),
}


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=lambda entry: entry.name)
def test_a_private_name_still_is_what_it_is_used_for(entry, tmp_path):
    try:
        holds = CANARIES[entry.name](tmp_path)
    except (AttributeError, ImportError, TypeError) as error:
        holds, why = False, f"{type(error).__name__}: {error}"
    else:
        why = "it does something else now"
    assert holds, f"{entry.package}'s {entry.name} ({entry.use}): {why}. Without it: {entry.without}"
