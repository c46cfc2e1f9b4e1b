"""`DecodeSession.from_pretrained`: a model's folder to a compiled model with its tokenizer."""

import os
from collections.abc import Mapping
from typing import Any

import torch


def load(
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    *,
    max_batch_size: int = 8,
    max_tokens: int = 4096,
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model, and the options of its session.

    Args:
        path: a folder that Transformers' `from_pretrained` takes, or a name on the hub.
        options: those of a session, and these:
            dtype: of the weights; default: as saved, on a CPU float32.
            device: default: the current GPU, else the CPU.
            compile: whether the model is compiled, by default.
            tokenizer: default: that of the folder, if it has one.
            model_kwargs: what `from_pretrained` of the model takes besides.
        max_batch_size, max_tokens: of the session, where `options` do not say; a model with fewer
            positions has fewer tokens.

    Raises:
        ValueError: the folder has no model.
    """
    from transformers import AutoModelForCausalLM

    import attn_ops.integrations.transformers  # noqa: F401  (the attention implementation)
    from fx_passes.backend import attn_ops as backend

    rest = dict(options)
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path must be a folder with a model, or a name on the hub, got {path!r}")
    wanted = rest.pop("device", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device must be one that is here, got {wanted!r}: {error}") from None
    dtype = rest.pop("dtype", "float32" if device.type == "cpu" else "auto")
    named = getattr(torch, str(dtype).removeprefix("torch."), None)
    if dtype != "auto" and not isinstance(named, torch.dtype):
        raise ValueError(f"dtype must be a floating-point type of torch or 'auto', got {dtype!r}")
    compiled, kwargs = rest.pop("compile", True), rest.pop("model_kwargs", {})
    if type(compiled) is not bool:
        raise ValueError(f"compile must be True or False, got {compiled!r}")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="attn_ops", dtype=dtype, **kwargs
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"path must be a folder with a model, got {str(path)!r}: {error}"
        ) from None
    model = model.to(device).eval().requires_grad_(False)
    if "tokenizer" not in rest:
        rest["tokenizer"] = tokenizer_of(path, kwargs)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", max_tokens)
    if "options" not in rest:  # which has them
        rest = {"max_batch_size": max_batch_size, "max_tokens": min(max_tokens, positions)} | rest
        rest.setdefault("merge_projections", "auto" if compiled else False)
    if compiled:
        model = torch.compile(model, backend=backend, fullgraph=True)
    return model, rest


def tokenizer_of(path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> Any:
    """The folder's tokenizer; None: it has none."""
    from transformers import AutoTokenizer

    named = {name: kwargs[name] for name in ("gguf_file", "revision", "token") if name in kwargs}
    try:
        return AutoTokenizer.from_pretrained(path, **named)
    except (OSError, ValueError, KeyError):
        return None
