"""Geometry of a model's attention layers, for builders and caches."""

import dataclasses
import inspect
from typing import Any

import torch

from attn_ops.integrations.transformers.batch import compute_all_rows
from attn_ops.integrations.transformers.hooks import mark_hooks
from attn_ops.integrations.transformers.latent import keep_latent, latent_shape
from attn_ops.integrations.transformers.layers import (
    NAME,
    cache_owner,
    chunk_size,
    features,
    has_latent,
    is_causal,
    shares_cache,
)
from attn_ops.integrations.transformers.rotary import trace_real_rotary
from attn_ops.integrations.transformers.states import OURS, keep_states, state_layers
from attn_ops.metadata import AttentionSpec
from attn_ops.metadata.features import spec_fields
from attn_ops.ops.checks import check_scale_values

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_WITH_STATES = {
    "linear_attention",
    "conv",
    "mamba",
    "hybrid",
    "hybrid_sliding",
    "attention",
    "mlp",
    "moe",
}
"""Types of models with layers that keep states: those layers, and what stands between them."""


def attention_specs(model: Any, kv_cache_dtype: str = "auto") -> list[AttentionSpec]:
    """Geometry of each self-attention layer of a Transformers model, in the order of `layer_idx`.

    A layer that shares another's KV cache is left out: there is one spec, and one cache, for each
    layer that writes. Models with such layers may drop rows by themselves, which is right for one
    sequence only; that is switched off (`compute_all_rows`). Layers with latent attention are
    prepared by `keep_latent`.

    Args:
        model: a decoder or an encoder; one of the two if a model has both.
        kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2: what the layers' caches hold.

    Returns:
        None of them where all layers keep states, as Mamba's do.

    Raises:
        ValueError: the model was not built with `attn_implementation="attn_ops"`, has no attention
            layers, or layers that share a cache differ in geometry or FP8 scales; or an adapter
            acts on some tokens alone.
    """
    compute_all_rows(model)
    layers = attention_layers(model)
    _check_adapters(model)
    mark_hooks(model, layers)
    for layer in filter(has_latent, layers):
        keep_latent(layer)
        trace_real_rotary(layer)
    for sharer in filter(shares_cache, layers):
        _check_sharing(sharer, layers, model, kv_cache_dtype)
    owners = [layer for layer in layers if not shares_cache(layer)]
    if state_layers(model):
        keep_states(model)
        for number, layer in enumerate(owners):  # others between them have no cache
            layer.cache_number = number
    return [_spec(layer, model, kv_cache_dtype) for layer in owners]


def _check_adapters(model: Any) -> None:
    """Adapters of peft act on every token. The model in a peft model would leave this one out."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"adapters must act on every token alike, got {name!r}, an activated LoRA, which "
                "acts behind its alora_invocation_tokens; supported: adapters without them"
            )


def attention_layers(model: Any) -> list[Any]:
    """The self-attention layers of a model, in the order of `layer_idx`.

    Raises:
        ValueError: see `attention_specs`.
    """
    layers = _layers(model)
    return [layer for layer in layers if is_causal(layer)] or layers


def cross_attention_specs(decoder: Any, kv_cache_dtype: str = "auto") -> list[AttentionSpec]:
    """Geometry of each cross-attention layer of a decoder, in the order of `layer_idx`.

    `attention_specs` documents arguments and errors.
    """
    layers = _layers(decoder)
    crossing = [layer for layer in layers if not is_causal(layer)]
    if not crossing or len(crossing) == len(layers):
        raise ValueError(
            "decoder must have causal and cross-attention layers, "
            f"got {len(layers) - len(crossing)} and {len(crossing)} in {type(decoder).__name__}"
        )
    return [_spec(layer, decoder, kv_cache_dtype) for layer in crossing]


def _layers(model: Any) -> list[Any]:
    config = model.config.get_text_config()
    _number_layers(model)
    layers, keeping = [m for m in model.modules() if _attends(m)], state_layers(model)
    if keeping and not layers:
        return []
    if config._attn_implementation != NAME:
        raise ValueError(
            f"attn_implementation must be {NAME!r}, got {config._attn_implementation!r}; call "
            "attn_ops.integrations.transformers.register() and pass it to from_pretrained "
            "or from_config"
        )
    if not layers:
        raise ValueError(
            "model must have layers that attend by Transformers' attention functions and have a "
            f"layer_idx, got {type(model).__name__}, whose layers have code of their own (as ALiBi "
            "has in BLOOM and MPT, which never call such a function) or do not attend at all"
        )
    types: set[str] = set(getattr(config, "layer_types", None) or ())
    _check_types(types - _LAYER_TYPES, bool(keeping))
    return sorted(layers, key=lambda m: m.layer_idx)


def _check_types(others: set[str], keeps_states: bool) -> None:
    """Raise a ValueError for layer types that are no attention over a paged cache, nor beside it.

    Args:
        others: that are not in `_LAYER_TYPES`.
        keeps_states: some layers call functions that take states.
    """
    known = sorted(_LAYER_TYPES | _WITH_STATES)
    if unknown := others - _WITH_STATES:
        raise ValueError(
            f"layer_types must be supported, got {', '.join(sorted(unknown))}; supported: "
            f"{', '.join(known)}; layers that select keys have no paged KV cache of all of them"
        )
    if others and not keeps_states:
        raise ValueError(
            f"layers with a state must call one of {', '.join(OURS)}, got none that does among "
            f"layers of the types {', '.join(sorted(others))}, which have code of their own"
        )


def _number_layers(model: Any) -> None:
    """Number the layers that are only told their number when they are called, as Zamba's are."""
    for name, module in model.named_modules():
        told = hasattr(module, "scaling") and getattr(module, "layer_idx", 0) in (None, -1)
        places = [int(part) for part in name.split(".") if part.isdigit()]
        if told and places and "layer_idx" in inspect.signature(type(module).forward).parameters:
            module.layer_idx = places[-1]


def _attends(module: Any) -> bool:
    """Whether a module is an attention layer. Decoder layers have a `layer_idx` too.

    ModernBERT's attention has no `scaling`.
    """
    if getattr(module, "layer_idx", None) is None:
        return False
    return hasattr(module, "scaling") or hasattr(module, "is_causal")


def _num_shards(layer: Any) -> int:
    """Over how many ranks the layer's heads are split."""
    return getattr(layer, "num_shards", 1)


def _spec(layer: Any, model: Any, kv_cache_dtype: str) -> AttentionSpec:
    if kv_cache_dtype != "auto":
        device = next((p.device for p in layer.parameters()), None)
        used = ("kv_scale",) if has_latent(layer) else ("k_scale", "v_scale")
        check_scale_values(layer, device, f" of layer {layer.layer_idx}", used)
    if has_latent(layer):
        sizes = (layer.num_heads // _num_shards(layer), latent_shape(layer), model.dtype)
        return AttentionSpec.of_latent(*sizes, kv_cache_dtype=kv_cache_dtype)
    config = model.config.get_text_config()
    head_size = _first(layer, "head_dim", "attention_head_size", "head_size")
    if head_size is None:
        raise ValueError(
            f"attention layers must have head_dim, got {type(layer).__name__}; "
            "supported: families built like Llama, BERT, BART or DeepSeek-V2"
        )
    num_heads = _first(layer, "num_heads", "num_attention_heads") or config.num_attention_heads
    num_heads //= _num_shards(layer)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=max(num_heads // getattr(layer, "num_key_value_groups", 1), 1),
        head_size=head_size,
        dtype=model.dtype,
        kv_cache_dtype=kv_cache_dtype,
        causal=is_causal(layer),
        attention_chunk_size=chunk_size(layer),
        **spec_fields(features(layer)),
    )


def _check_sharing(sharer: Any, layers: list[Any], model: Any, kv_cache_dtype: str) -> None:
    """Raise a ValueError unless the sharer can read the cache of the layer that it names."""
    owner = next((m for m in layers if m.layer_idx == cache_owner(sharer)), None)
    if owner is None or shares_cache(owner):
        raise ValueError(
            f"layer {sharer.layer_idx} must share the cache of a layer that has one, "
            f"got layer {cache_owner(sharer)}"
        )
    mine, its = (_spec(layer, model, kv_cache_dtype) for layer in (sharer, owner))
    for field in dataclasses.fields(mine):
        got, wanted = getattr(mine, field.name), getattr(its, field.name)
        if got != wanted:
            raise ValueError(
                f"{field.name} of layer {sharer.layer_idx} must be {wanted}, that of layer "
                f"{owner.layer_idx}, whose cache it shares, got {got}"
            )
    for name in ("k_scale", "v_scale") if kv_cache_dtype != "auto" else ():
        scales = [getattr(layer, name, None) for layer in (sharer, owner)]
        if not _equal(*scales):
            raise ValueError(
                f"{name} of layer {sharer.layer_idx} must be that of layer {owner.layer_idx}, "
                f"whose cache it shares, got {scales[0]} and {scales[1]}"
            )


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _first(layer: Any, *names: str) -> Any:
    """The first of these attributes that the layer has; None if it has none."""
    return next((getattr(layer, n) for n in names if getattr(layer, n, None) is not None), None)
