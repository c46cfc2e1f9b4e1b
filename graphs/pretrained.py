"""Loads a folder's model with our attention, and its tokenizer: `from_pretrained` of a session."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)
"""A folder with a tokenizer has one of these files."""

PathLike = str | os.PathLike[str]


def load(
    path: PathLike, options: Mapping[str, Any], *, max_batch_size: int = 8, max_tokens: int = 4096
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model, compiled, and the options of its session.

    Args:
        path: a folder that Transformers' `from_pretrained` takes, or a name on the hub.
        options: those of a session, and these:
            dtype: of the weights; default: as saved, on a CPU float32.
            device: default: the current GPU, else the CPU.
            compile: whether the model is compiled; default: True.
            tokenizer: default: that of the folder, if it has one.
            model_kwargs: what `from_pretrained` of the model takes besides.
        max_batch_size, max_tokens: of the session, where `options` do not say; a model with fewer
            positions has fewer tokens.

    Raises:
        ValueError: there is no model, its tokenizer does not load, or an option is out of range.
    """
    from fx_passes.backend import attn_ops as backend

    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path must be a folder with a model, or a name on the hub, got {path!r}")
    rest = dict(options)
    device = _device(rest.pop("device", "cuda" if torch.cuda.is_available() else "cpu"))
    dtype = rest.pop("dtype", "float32" if device.type == "cpu" else "auto")
    named = getattr(torch, str(dtype).removeprefix("torch."), None)
    if dtype != "auto" and not isinstance(named, torch.dtype):
        raise ValueError(f"dtype must be a floating-point type of torch or 'auto', got {dtype!r}")
    compiled, kwargs = rest.pop("compile", True), rest.pop("model_kwargs", {})
    if type(compiled) is not bool:
        raise ValueError(f"compile must be True or False, got {compiled!r}")
    try:
        model = model_of(path, device, dtype, **kwargs)
    except (OSError, ValueError) as error:
        text = f"path must be a folder with a model, got {str(path)!r}: {error}"
        raise ValueError(text) from None
    if "tokenizer" not in rest:
        names = ("gguf_file", "revision", "token", "local_files_only")
        rest["tokenizer"] = tokenizer_of(path, **{n: kwargs[n] for n in names if n in kwargs})
    if "options" not in rest:  # which has them
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        most = max_tokens if positions is None else min(max_tokens, positions)
        rest = {"max_batch_size": max_batch_size, "max_tokens": most} | rest
        rest.setdefault("merge_projections", "auto" if compiled else False)
    if compiled:
        model: Any = torch.compile(model, backend=backend, fullgraph=True)
    return model, rest


def model_of(path: PathLike, device: torch.device, dtype: Any, **kwargs: Any) -> Any:
    """The causal model in a folder with our attention, for inference on a device.

    Raises:
        OSError, ValueError: of Transformers.
    """
    from transformers import AutoModelForCausalLM

    from attn_ops.integrations.transformers import register

    register()
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="attn_ops", dtype=dtype, **kwargs
    )
    return model.to(device).eval().requires_grad_(False)


def tokenizer_of(path: PathLike, **kwargs: Any) -> Any | None:
    """The tokenizer in a folder; None: it has none.

    Raises:
        ValueError: it does not load.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    inside = "gguf_file" in kwargs or any((folder / name).is_file() for name in TOKENIZERS)
    if folder.is_dir() and not inside:
        return None
    try:
        return AutoTokenizer.from_pretrained(path, **kwargs)
    except Exception as error:  # of whatever library it is made with
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model must have a tokenizer that loads, got {str(path)!r}: {reason}"
        ) from error


def _device(wanted: Any) -> torch.device:
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device must be one that is here, got {wanted!r}: {error}") from None
