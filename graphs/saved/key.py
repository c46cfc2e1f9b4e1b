"""What a compilation depends on, before it begins: sections of text, and a digest of each."""

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
from graphs.saved.code import classes_of, own_source
from graphs.saved.fingerprint import Describer, digest_of
from graphs.saved.plan import NotSavedError

_LIBRARIES = ("torch", "triton", "transformers", "attn-ops", "flashinfer-python", "numpy")


def key_of(
    model: nn.Module, compiled: Any, inputs: Mapping[str, Any], batch: str
) -> dict[str, str]:
    """Digests by section.

    Args:
        model: as Transformers made it.
        compiled: what `torch.compile` made of it.
        inputs: keywords of its first call.
        batch: what passes may read of the batch's metadata.

    Raises:
        NotSavedError: something of the model or its options has no key.
    """
    _check_hidden_state()
    sections = {
        "versions": _versions(),
        "code of attn_ops": own_source(),
        "device": json.dumps(CacheBase.get_system(), sort_keys=True, default=str),
        "options of torch.compile": _options(compiled),
        "settings of torch": _settings(),
        "model": classes_of(model) + Describer(strict=True).text(model),
        "weights": _tensors({**dict(model.named_parameters(remove_duplicate=False)),
                             **dict(model.named_buffers(remove_duplicate=False))}),
        "batch": _inputs(inputs) + batch,
    }  # fmt: skip
    return {name: digest_of(text) for name, text in sections.items()}


def _check_hidden_state() -> None:
    """What Dynamo would trace, but nobody could compare."""
    if (
        torch._C._len_torch_function_stack()
        or torch.utils._python_dispatch._len_torch_dispatch_stack()
    ):
        raise NotSavedError("a torch function or dispatch mode is on")
    if nn.modules.module._has_any_global_hook():
        raise NotSavedError("modules have global hooks")


def _versions() -> str:
    found = {"python": sys.version, "machine": platform.platform()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return json.dumps(found | {"torch": torch.__version__, "git": str(torch.version.git_version)})


def _options(compiled: Any) -> str:
    """Of `torch.compile`, and the passes that they choose.

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
    """Of the process."""
    inductor = inductor_config.save_config_portable()
    for name, value in inductor_config.get_config_copy().items():
        if "custom" in name and value is not None and not isinstance(value, bool | str | int):
            inductor[name] = _custom(name, value)
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
    ]
    configs = [inductor, functorch_config.save_config_portable()]
    configs.append(torch._dynamo.config.save_config_portable())
    return repr(state) + json.dumps(configs, sort_keys=True, default=_refused)


def _custom(name: str, value: Any) -> str:
    if isinstance(value, list | tuple | dict) and not value:
        return "none"
    if name == SLOT:
        return "a pass of the user's"  # in the options' section
    return _option(name, value)


def _refused(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return str(sorted(map(str, value)))
    return Describer(strict=False).text(value)


def _tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Geometry, and which share memory: values do not count."""
    storages: dict[int, int] = {}
    lines = []
    for name, t in tensors.items():
        number = storages.setdefault(t.untyped_storage()._cdata, len(storages))
        place = (number, t.storage_offset(), t.data_ptr() % 16)
        lines.append(
            f"{name} {type(t).__name__} {tuple(t.shape)} {t.stride()} {t.dtype} {t.device} "
            f"{t.requires_grad} {place} {_layout(t)}"
        )
    return "\n".join(lines)


def _layout(tensor: torch.Tensor) -> str:
    """What a tensor of a class of its own is made of, such as a quantized weight of torchao.

    Raises:
        NotSavedError: it does not say.
    """
    if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer):
        return ""
    if not hasattr(tensor, "__tensor_flatten__"):
        raise NotSavedError(f"a tensor of {type(tensor).__qualname__} has no key")
    names, context = tensor.__tensor_flatten__()
    parts = "\n".join(f"{name}: {_tensors({name: getattr(tensor, name)})}" for name in names)
    return f"{type(tensor).__module__} {Describer(strict=True).text(context)} {parts}"


def _inputs(inputs: Mapping[str, Any]) -> str:
    tensors, rest = {}, []
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, list | tuple) and all(isinstance(v, torch.Tensor) for v in value):
            # Of caches no number of blocks: the plan says which ones it takes.
            some = [v[:0] if name == "kv_caches" else v for v in value]
            tensors |= {f"{name}[{i}]": v for i, v in enumerate(some)}
        elif value is None or isinstance(value, bool | int | float | str):
            rest.append(f"{name}={value!r}")
        else:
            rest.append(f"{name} is {type(value).__module__}.{type(value).__qualname__}")
    return _tensors(tensors) + "\n" + "\n".join(rest)
