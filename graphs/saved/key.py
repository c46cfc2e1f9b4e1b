"""What a compilation depends on, in sections, with a digest of each."""

import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.codecache import CacheBase
from torch._inductor.custom_graph_pass import CustomGraphPass

from fx_passes.backend import attn_ops
from fx_passes.config import PassConfig
from fx_passes.inductor_slot import SLOT, with_user_pass
from fx_passes.pipeline import passes
from graphs.saved.described import classes_of, digest_of, name_of, own_source, text_of
from graphs.saved.folder import NotSavedError
from graphs.saved.loaded import is_constant

_LIBRARIES = ("torch", "triton", "transformers", "attn-ops", "flashinfer-python", "numpy")


def key_of(
    model: nn.Module, compiled: Any, inputs: Mapping[str, Any], batch: str
) -> dict[str, str]:
    """Digests by section.

    Args:
        model: the uncompiled model.
        compiled: the compiled one.
        inputs: keywords of its first call.
        batch: what passes may read of the batch's metadata.

    Raises:
        NotSavedError: a part of the model or an option has no key.
    """
    sections = {
        "versions": _versions(),
        "code of attn_ops": own_source(),
        "device": json.dumps(CacheBase.get_system(), sort_keys=True, default=str),
        "options of torch.compile": _options(compiled),
        "settings of torch": _settings(),
        "code of the model": classes_of(model),
        "model": text_of(model),
        "batch": _inputs(inputs) + batch,
    }
    return {name: digest_of(text) for name, text in sections.items()}


def _versions() -> str:
    found = {"python": sys.version, "machine": platform.platform()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return json.dumps(found | {"torch": torch.__version__, "git": str(torch.version.git_version)})


def _options(compiled: Any) -> str:
    """Options of `torch.compile`, and the passes that they choose.

    Raises:
        NotSavedError: another backend, or a pass without a key.
    """
    wrapper = compiler_of(compiled)
    options = dict(wrapper.kwargs.get("options") or {})
    config, rest = PassConfig.split(options)
    if config.early_launch == "off":
        raise NotSavedError("early_launch='off' is of the call, not of what is compiled")
    pipeline = with_user_pass(config, rest.pop(SLOT, getattr(inductor_config, SLOT)))
    uuid = pipeline.uuid()
    if uuid is None:
        raise NotSavedError("a pass of the user's has no uuid")
    texts = [repr(config), repr(uuid), repr(wrapper.dynamic), repr(wrapper.kwargs.get("mode"))]
    texts += [f"{name}={_option(name, value)}" for name, value in sorted(rest.items())]
    for one in passes(config, "dynamo"):
        texts.append(f"{one.name}\0{one.source()}\0{sorted(one.settings().items())}")
        texts.append(repr(one.token_range))
    return "\0".join(texts)


def compiler_of(compiled: Any) -> Any:
    """What `torch.compile` calls: `compiler_fn` with `kwargs`.

    Raises:
        NotSavedError: it is not our backend, or the model is not compiled as a whole.
    """
    callback = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    wrapped = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")
    while inner := next((getattr(callback, n) for n in wrapped if hasattr(callback, n)), None):
        callback = inner
    if getattr(callback, "compiler_fn", None) is not attn_ops:
        raise NotSavedError("the model is not compiled by torch.compile(model, backend='attn_ops')")
    return callback


def _option(name: str, value: Any) -> str:
    if isinstance(value, CustomGraphPass):
        uuid = value.uuid()
        if uuid is not None:
            return repr(uuid)
    elif value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise NotSavedError(f"the option {name} has no key")


def _settings() -> str:
    """Settings of torch in this process."""
    custom = {
        name: _option(name, value) for name, value in inductor_config.get_config_copy().items()
        if "custom" in name and name != SLOT and value and not isinstance(value, bool | str | int)
    }  # fmt: skip
    state = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.get_num_threads(),
        torch._C._len_torch_function_stack(),  # a default device is such a mode
    ]
    configs = [inductor_config, functorch_config, torch._dynamo.config]
    return text_of([custom, state, [config.save_config_portable() for config in configs]])


def _inputs(inputs: Mapping[str, Any]) -> str:
    """Inputs of a call; of caches no number of blocks, for the plan says which ones it takes."""
    given = {}
    for name, value in inputs.items():
        if name == "kv_caches":
            value = [cache[:0] for cache in value]
        plain = is_constant(value) or isinstance(value, torch.Tensor | list | tuple)
        given[name] = value if plain else name_of(type(value))
    return text_of(given)
