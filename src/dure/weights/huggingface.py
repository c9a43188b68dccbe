"""Architectures from a Hugging Face folder's config.json, with `transformers` (extra `hf`).

The model is built as `AutoModel.from_pretrained` would build it, but on the meta device and without reading a weight:
those come through our own path. Then `initialise_rest` gives memory and transformers' own first values to all that no
file brought: a new head, and buffers that are never saved. The result is the same bits as `from_pretrained`'s.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from dure.base.errors import JobError, WeightsError
from dure.storage.safetensors import said
from dure.weights.mapping import PLAIN, Naming
from dure.weights.source import Source


def build(
    source: Source,
    arguments: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device = "meta",
) -> torch.nn.Module:
    """The model of a source's config.json, in training mode; on the meta device it takes no memory and no time.

    `arguments` are what `from_pretrained` takes: `auto` names the class (AutoModel when left out), settings of the
    config (`num_labels`) override it, the rest (`dtype`, `attn_implementation`) goes to the model.
    """
    told = dict(arguments or {})
    transformers = _transformers()
    auto = _auto_class(transformers, told.pop("auto", "AutoModel"))
    if "trust_remote_code" in told:
        raise JobError(
            "model.args.trust_remote_code: code from a model's folder is never run; write model.factory"
        )
    config, others = _config(transformers, source, told)
    if others.get("dtype", "auto") == "auto":
        others["dtype"] = config.dtype or _first_dtype(source)
    others["dtype"] = _dtype(others["dtype"])
    try:
        with torch.device(device):
            module: torch.nn.Module = auto.from_config(config, trust_remote_code=False, **others)
    except Exception as error:
        raise JobError(
            f"model.args: transformers.{auto.__name__} cannot build a {said(config.model_type)} with "
            f"{', '.join(sorted(arguments or {})) or 'no arguments'}: {type(error).__name__}: {error}"
        ) from error
    _keep_in_fp32(module, others["dtype"])
    return module.train()


def naming_of(module: torch.nn.Module) -> Naming:
    """How transformers maps names in files to this model's, old spellings and the body's prefix included; the plain
    way for any other model, without importing transformers."""
    module = getattr(module, "_orig_mod", module)  # torch.compile's wrapper
    if not is_pretrained_model(module):
        return PLAIN
    loading = importlib.import_module("transformers.core_model_loading")
    conversion = importlib.import_module("transformers.conversion_mapping")
    transforms = conversion.get_model_conversion_mapping(module)
    renamings = [entry for entry in transforms if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, loading.WeightConverter)]
    prefix, state = module.base_model_prefix, module.state_dict()

    def rename(name: str) -> str:
        renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = loading.rename_source_key(name, [], [], prefix, state)
        if pattern is not None and renamed in state:
            raise WeightsError(
                f"{said(name)} is stored in another form than {type(module).__name__} has it (transformers computes "
                f"{said(renamed)} from several tensors); load and save it once with transformers (from_pretrained, "
                "save_pretrained with save_original_format=False) and use that folder"
            )
        return str(renamed)

    def left_over(missing: set[str], unexpected: set[str]) -> SimpleNamespace:
        info = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
        module._adjust_missing_and_unexpected_keys(info)  # type: ignore[operator]
        return info

    return Naming(
        rename=rename,
        may_be_missing=lambda name: not left_over({name}, set()).missing_keys,
        may_be_unexpected=lambda name: not left_over(set(), {rename(name)}).unexpected_keys,
    )


def initialise_rest(module: torch.nn.Module, device: str | torch.device = "cpu") -> tuple[str, ...]:
    """Give everything that is still on the meta device memory and its first values; returns those names.

    What is there already is left alone. Draws from torch's global generator, exactly as `from_pretrained` does for
    what its file does not have: seed it before.
    """
    if not is_pretrained_model(module):
        raise TypeError(f"{type(module).__name__} is not a model of transformers")
    fresh: dict[int, torch.Tensor] = {}
    names = []
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_meta:
            fresh[id(tensor)] = _real(tensor, device)
        else:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for prefix, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                # All names of a tied tensor get the same new one.
                if tensor is not None and id(tensor) in fresh:
                    table[name] = fresh[id(tensor)]
                    names.append(f"{prefix}.{name}" if prefix else name)
    module.initialize_weights()  # type: ignore[operator]
    return tuple(names)


def is_pretrained_model(module: torch.nn.Module) -> bool:
    """Whether transformers wrote this model; if nobody has imported transformers, it did not."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _real(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise JobError(
            "model.weights is a Hugging Face folder without a model.factory, which needs the package transformers; "
            "install dure[hf], or write a factory"
        ) from error


def _auto_class(transformers: Any, name: object) -> Any:
    if isinstance(name, str) and name.startswith("AutoModel") and hasattr(transformers, name):
        return getattr(transformers, name)
    known = [known for known in dir(transformers) if known.startswith("AutoModel")]
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.3)
    raise JobError(
        f"model.args.auto: transformers has no {said(str(name))}; it has {', '.join(near or known)}"
    )


def _config(transformers: Any, source: Source, told: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    file = source.files[0][0] if source.files else "the weights"
    if source.config is None:
        raise JobError(f"there is no config.json beside {file} to build a model from; write model.factory")
    kind = source.config.get("model_type")
    known = transformers.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        own = " (code in the model's own folder is never run)" if "auto_map" in source.config else ""
        raise WeightsError(
            f"config.json beside {file} has the model_type {said(str(kind))}, which transformers "
            f"{transformers.__version__} does not know{own}; write a model.factory that builds it"
        )
    if source.config.get("quantization_config") is not None:
        raise WeightsError(
            f"config.json beside {file} says that the weights are quantized; they cannot be trained"
        )
    try:
        config, others = known[kind].from_dict(dict(source.config), return_unused_kwargs=True, **told)
    except Exception as error:
        raise WeightsError(
            f"config.json beside {file} cannot be used: {type(error).__name__}: {error}"
        ) from error
    return config, others


def _first_dtype(source: Source) -> torch.dtype:
    """As transformers does when the config says nothing: the first floating one that a model can be made of."""
    floating = (t.dtype for t in source.tensors if t.dtype.is_floating_point and t.dtype.itemsize > 1)
    return next(floating, torch.float32)


def _dtype(value: object) -> torch.dtype:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise JobError(f"model.args.dtype is {value!r}; use float32, bfloat16, float16 or auto")
    return found


def _keep_in_fp32(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Some architectures name layers that half precision would break."""
    plan = module._get_dtype_plan(dtype)  # type: ignore[operator]
    if not plan:
        return
    loading = importlib.import_module("transformers.core_model_loading")
    pattern, groups, _ = loading.build_glob_alternation(list(plan))
    for name, tensor in module.state_dict(keep_vars=True).items():
        found = pattern.search(name)
        if found is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(plan[groups[found.lastgroup]])
