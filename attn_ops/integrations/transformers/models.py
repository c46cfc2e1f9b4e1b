"""What a model must be, before anything of it is called."""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn

from attn_ops.integrations.merged import mend_merged, merged_in_words
from attn_ops.integrations.merged_views import MergedViews
from attn_ops.integrations.transformers.batch import check_lengths
from attn_ops.integrations.transformers.layers import NAME
from attn_ops.integrations.transformers.rotary import follow_requests
from attn_ops.integrations.transformers.sharded import keep_parts, num_ranks


class Prepared(Protocol):
    """What a caller wants of a model."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def merge_projections(self) -> bool | str: ...


def attention_configs(model: nn.Module) -> list[Any]:
    """Configs of a model and its parts that name an attention implementation; its own is first."""
    configs = {id(c): c for m in model.modules() if (c := vars(m).get("config")) is not None}
    return [c for c in configs.values() if hasattr(c, "_attn_implementation")]


@contextlib.contextmanager
def keeping_attention(model: nn.Module) -> Iterator[list[Any]]:
    """Give `attention_configs` their attention implementations back after the block."""
    configs = attention_configs(model)
    before = [config._attn_implementation for config in configs]
    try:
        yield configs
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def prepare_model(model: Any, wanted: Prepared, *, compiled: bool) -> str:
    """Check a model, and merge its projections if that is wanted; what was merged, in words.

    Args:
        model: see `check_model`.
        wanted: `max_tokens` of a request, and `merge_projections` as `merged_in_words` takes it.
        compiled: whether torch.compile has the model.
    """
    if isinstance(model, nn.Module) and num_ranks(model) > 1:
        keep_parts(model)
    if wanted.merge_projections is not False and isinstance(model, nn.Module):
        mend_merged(model)
    check_model(model, wanted.max_tokens)
    return merged_in_words(model, wanted.merge_projections, compiled=compiled)


def check_model(model: Any, max_tokens: int) -> None:
    """Raise a ValueError unless this is a Transformers model that draws next tokens, with weights.

    Args:
        model: uncompiled; whatever a user passes.
        max_tokens: of a request, as `check_lengths` takes it.
    """
    if isinstance(model, str):
        raise ValueError(
            f"model must be a loaded model, got the name {model!r}; load it with "
            f"AutoModelForCausalLM.from_pretrained({model!r}, attn_implementation={NAME!r})"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    name = type(model).__name__
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ValueError(
            f"model must have a Transformers config, got {name} without one; supported: causal "
            "models of Transformers. A module of your own runs by hand: examples/own_model.py and "
            "docs/by_hand.md"
        )
    if getattr(model.config, "is_encoder_decoder", False) and not _is_decoder(model):
        raise ValueError(
            f"model must be a decoder alone, got {name}, an encoder with a decoder; see "
            "docs/by_hand.md"
        )
    if not _draws_tokens(model):
        raise ValueError(
            f"model must compute logits of the next token, got {name}; supported: causal language "
            "models (AutoModelForCausalLM)"
        )
    _check_weights(model)
    follow_requests(model, max_tokens)
    check_lengths(model, max_tokens)
    MergedViews(model).check()


def _is_decoder(model: Any) -> bool:
    """Whether it is the decoder of such a pair, built as a causal model."""
    return getattr(model.config, "is_decoder", False)


def _draws_tokens(model: Any) -> bool:
    can_generate = getattr(model, "can_generate", None)
    return can_generate is None or bool(can_generate())


def _check_weights(model: nn.Module) -> None:
    devices = {parameter.device.type for parameter in model.parameters()}
    if not devices:
        raise ValueError(f"model must have weights, got {type(model).__name__} without any")
    if "meta" in devices:
        raise ValueError(
            "weights of the model must be loaded, got some on the device meta; call "
            "from_pretrained, or to_empty(device=...) and load a state dict"
        )
