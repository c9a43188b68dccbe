"""Every private name of another package that dure uses: what for, and what happens where it is gone.

One public class is changed in place, as torch has no hook there: `DistributedSampler.__iter__` and `set_epoch` get a
look in front of them (proof/detectors/samplers.py), in scripts under `dure run` and after `dure.attach`; without them
nothing is noticed. Its canary is there too.

A private name may change with any release. Each one here has a canary in tests/unit/test_private_names.py that says
what broke, and a test keeps other private names out of the source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateName:
    """One name, as the source spells it: dotted from the package, or `.name` for an attribute of an object."""

    package: str
    name: str
    use: str
    without: str
    """The fallback, or how the lack of it shows: never as silently other bits."""


_STORES = "the same class as torch.distributed's of that name, which torch's type stubs do not export"
_IMPORT_FAILS = "the import fails: import it from torch.distributed instead"

PRIVATE_NAMES = (
    PrivateName("torch", "torch._C._distributed_c10d.Store", _STORES, _IMPORT_FAILS),
    PrivateName("torch", "torch._C._distributed_c10d.HashStore", _STORES, _IMPORT_FAILS),
    PrivateName("torch", "torch._C._distributed_c10d.PrefixStore", _STORES, _IMPORT_FAILS),
    PrivateName("torch", "torch._C._distributed_c10d.TCPStore", _STORES, _IMPORT_FAILS),
    PrivateName("torch", "torch._C._distributed_c10d.GradBucket", _STORES, _IMPORT_FAILS),
    PrivateName(
        "torch",
        "torch._foreach_add_",
        "adds a shard's gradients to the subtree's sum in one call",
        "AttributeError at the first step: a loop over `add_` gives the same bits, slower",
    ),
    PrivateName(
        "torch",
        "torch._foreach_copy_",
        "copies many tensors in one call",
        "AttributeError at the first step: a loop over `copy_` gives the same bits, slower",
    ),
    PrivateName(
        "torch",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "sees every operator of the probe's forward pass",
        "the import fails: models could not be checked for collectives of their own, so nothing is trained",
    ),
    PrivateName(
        "torch",
        "torch._dynamo.config",
        "has torch.compile make a kernel for each shape, whatever came before",
        "the import fails when a team starts: without it bits could depend on the number of ranks",
    ),
    PrivateName(
        "torch",
        "torch._dynamo",
        "imported by the prefork server for scripts; in ranks of `dure train` only when something is compiled, until "
        "when four of its names are answered for it (base/dynamo_on_demand.py)",
        "only the start is slower: a preload that cannot be imported is left out, an unknown name imports the package",
    ),
    PrivateName(
        "torch",
        "torch._dynamo.eval_frame",
        "whether the compiler is there: only then there is compiled code for the probe to look at as eager code",
        "set_stance would not be called: compiled code that the probe has met would stay eager; its canary says so",
    ),
    PrivateName(
        "torch",
        "._version",
        "counts writes to a tensor: weights written outside of the update, buffers written by the forward pass",
        "AttributeError at the first step",
    ),
    PrivateName(
        "torch",
        "._share_fd_cpu_",
        "the descriptor of a bucket that was moved into shared memory, for the node's other ranks",
        "AttributeError when the first bucket is shared; reduce.transport = gloo goes without",
    ),
    PrivateName(
        "torch",
        "._pg_map",
        "keeps process groups until no thread of theirs is left at the interpreter's end",
        "left alone where it is no dictionary: then torch's own order at the end holds",
    ),
    PrivateName(
        "torch",
        "._join_config",
        "whether a model that was attached is inside DDP's join(), which the exchange cannot do",
        "AttributeError at the first backward pass of an attached model",
    ),
    PrivateName(
        "torch",
        "._comm_hooks",
        "whether a model's ranks average weights instead of gradients (local SGD), so that differing is no mistake",
        "taken as without hooks: such a script would be warned; its canary says so",
    ),
    PrivateName(
        "torch",
        "._pre_forward",
        "prepares DDP's reducer for the backward pass whose gradients ranks exchange",
        "AttributeError at the first step of several ranks",
    ),
    PrivateName(
        "torch",
        "._post_forward",
        "tells DDP's reducer that this backward pass comes",
        "AttributeError at the first step of several ranks",
    ),
    PrivateName(
        "torch",
        "._post_accumulate_grad_hooks",
        "tells whether a parameter has hooks that would see sums of a part of the shards",
        "AttributeError when the model is replicated",
    ),
    PrivateName(
        "torch",
        "._inside_ddp_forward",
        "marks the forward pass as DDP's, for the compiler, which cuts graphs where DDP's buckets end",
        "AttributeError at the first step",
    ),
    PrivateName(
        "torch",
        "torch._amp_foreach_non_finite_check_and_unscale_",
        "multiplies a lone rank's gradients and looks for what is not finite, in one pass",
        "AttributeError at the first step of a rank alone: `_foreach_mul_` and a look of its own give the same bits",
    ),
    PrivateName(
        "torch",
        "torch._foreach_mul_",
        "multiplies a lone rank's gradients in one call, where they are not fp32 on a CPU",
        "AttributeError at the first step: a loop over `mul_` gives the same bits, slower",
    ),
    PrivateName(
        "torch",
        "torch._C._dynamo.eval_frame",
        "keeps torch.compile out of the backend's own methods",
        "AttributeError when the first process group is made",
    ),
    PrivateName(
        "torch",
        "._FrameExecStrategy",
        "says that a method is run as it is, with all that it calls",
        "AttributeError when the first process group is made",
    ),
    PrivateName(
        "torch",
        "._FrameAction",
        "says that a method is run as it is, with all that it calls",
        "AttributeError when the first process group is made",
    ),
    PrivateName(
        "torch",
        "._checkpoint_offset",
        "where torch.load onto the meta device has found a tensor's bytes in the archive",
        "WeightsError: the bytes are not where the archive says",
    ),
    PrivateName(
        "torch",
        "._orig_mod",
        "the model inside torch.compile's wrapper",
        "a compiled model of transformers is loaded by plain names; missing ones are refused",
    ),
    PrivateName("torch", "._parameters", "a module's own parameters, by name", "AttributeError"),
    PrivateName("torch", "._buffers", "a module's own buffers, by name", "AttributeError"),
    PrivateName("torch", "._modules", "a module's own children, by name", "AttributeError"),
    PrivateName(
        "torch", "._non_persistent_buffers_set", "buffers that state_dict leaves out", "AttributeError"
    ),
    PrivateName(
        "torch",
        "_c10d_functional",
        "the namespace of torch's functional collectives, looked for in the probe's forward pass",
        "a model that communicates by itself would not be refused at the probe; its canary says so",
    ),
    PrivateName(
        "transformers",
        "._adjust_missing_and_unexpected_keys",
        "which tensors transformers itself does not miss in a file",
        "AttributeError before anything is loaded",
    ),
    PrivateName(
        "transformers",
        "._is_hf_initialized",
        "marks tensors that are loaded, so that `initialize_weights` leaves them alone",
        "loaded weights would be drawn anew: the fingerprint of what was loaded differs from the file's",
    ),
    PrivateName(
        "transformers",
        "._get_dtype_plan",
        "layers that stay in fp32 in a model of half precision",
        "AttributeError before anything is loaded",
    ),
    PrivateName(
        "python",
        "runpy._run_module_as_main",
        "runs a script's module in the real `__main__`, as `python -m` does",
        "AttributeError when ranks start with -m",
    ),
    PrivateName(
        "python",
        "._config",
        "where multiprocessing keeps its sockets: in one folder, which is removed though ranks were killed",
        "AttributeError when the first ranks are started",
    ),
    PrivateName(
        "python",
        "atexit._run_exitfuncs",
        "what a script registered is called, though the interpreter's teardown is left out",
        "skipped: the process ends all the same",
    ),
    PrivateName(
        "sympy",
        "._assumptions_rng",
        "a forked rank has random numbers of its own, as a fresh process has",
        "AttributeError when a rank is forked",
    ),
    PrivateName(
        "sympy",
        "._prng",
        "a forked rank has random numbers of its own, as a fresh process has",
        "AttributeError when a rank is forked",
    ),
)
