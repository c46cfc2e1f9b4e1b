"""The attention function that Transformers' layers call.

T rows of the batch, E rows of an encoder, N query heads, K kv heads, H head size; V that of values
and L the latent where they are expanded from one.
"""

from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.integrations.transformers.hooks import guard_hooks
from attn_ops.integrations.transformers.latent import (
    check_keeps_latent,
    expanded,
    latent_attention,
    latent_shape,
)
from attn_ops.integrations.transformers.layers import (
    blocksparse,
    cache_index,
    chunk_size,
    features_of_call,
    has_latent,
    is_causal,
    shares_cache,
    window,
)
from attn_ops.integrations.transformers.probe import AttentionProbe, ProbedCall
from attn_ops.metadata import AttentionMetadata, AttentionSpec
from attn_ops.metadata.features import spec_fields
from attn_ops.ops import attention, varlen_attention, write_kv
from attn_ops.ops.checks import check_layout
from attn_ops.ops.write_kv import SlotMapping, slots_of_layer

_FROM_LAYER = object()
"""A layer that passes no window: Qwen2-MoE and PhiMoE leave it to the mask."""

Batch = tuple[AttentionMetadata | None, Sequence[torch.Tensor] | None, SlotMapping | None]
"""Metadata, KV caches and slots, as a model is called with them."""

PagedBatch = tuple[AttentionMetadata, Sequence[torch.Tensor], torch.Tensor | None]
"""The same where there are caches."""


_ELSEWHERE = (
    "use graphs.DecodeSession, or, for model.generate, model.set_attn_implementation('sdpa'). "
    "from_config(config, attn_implementation=...) sets it in that config too, for every model that "
    "is built from it later"
)


class KeywordsMissing(ValueError):
    """An attention layer was called without a batch, or without caches.

    `model.generate` gives none. A model that drops keywords needs `carry_keywords`, which
    `graphs.DecodeSession` calls.
    """

    def __init__(self, meta: object, caches: object) -> None:
        super().__init__(
            "attn_metadata and kv_caches must be forward keywords of a model with "
            f"attn_implementation='attn_ops', got {type(meta).__name__} and "
            f"{type(caches).__name__}; supported without kv_caches: encoders; {_ELSEWHERE}"
        )


class MaskGiven(ValueError):
    """A model was called with a mask, or made one itself."""

    def __init__(self) -> None:
        super().__init__(
            "attention_mask must be None with attn_implementation='attn_ops', got a tensor: a "
            f"batch is packed, not padded; {_ELSEWHERE}"
        )


def no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Build no mask: the batch's metadata implies it.

    Raises:
        MaskGiven: the caller passed a mask, which would be ignored.
    """
    if attention_mask is not None:
        raise MaskGiven


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Any = _FROM_LAYER,
    softcap: float | None = None,
    attn_metadata: AttentionMetadata | None = None,
    kv_caches: Sequence[torch.Tensor] | None = None,
    slot_mapping: SlotMapping | None = None,
    kv_cache_dtype: str = "auto",
    cross_attn_metadata: AttentionMetadata | None = None,
    cross_kv_caches: Sequence[torch.Tensor] | None = None,
    cross_slot_mapping: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of one layer, as Transformers calls it.

    query [1, N, T, H], key and value [1, K, T, H], s_aux [N] of GPT-OSS. There are three
    kinds of layers:

    - Causal layers attend over `kv_caches`. A layer that shares another's cache writes nothing, and
      its key and value are not read.
    - Other layers attend over `cross_kv_caches`, if those are given. Key and value are then the
      encoder's, [1, K, E, H].
    - Without any caches they attend over key and value.

    Layers with latent attention are causal layers. Key and value are then the rotated part of the
    key, [1, 1, T, R], and the latent, [1, 1, T, Lkv] (`keep_latent`).

    An `AttentionProbe` as metadata gets the call in place of the operators.

    Returns:
        [1, T, N, H], or [1, T, N, V], and None (no attention weights).
    """
    causal = is_causal(module) and kwargs.get("is_causal") is not False
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is _FROM_LAYER:
        sliding_window = window(module) if causal else None
    options: dict[str, Any] = {**features_of_call(sliding_window, softcap, s_aux)}
    tables = blocksparse(module)
    if tables is not None:
        options["blocksparse"] = tables
    probe: Any = attn_metadata
    compiling = torch.compiler.is_compiling()
    if not compiling and isinstance(probe, AttentionProbe):
        _refuse_ignored(None, dropout, kwargs)
        spec = _spec_of_call(module, query, key, causal, options)
        asked = (spec, scale, attention_mask, kwargs)
        return probe.attend(_probed_call(probe, module, (query, key, value), *asked)), None
    if causal and attn_metadata is None:
        raise KeywordsMissing(attn_metadata, kv_caches)
    _refuse_ignored(attention_mask, dropout, kwargs)
    own = (attn_metadata, kv_caches, slot_mapping)
    cross = (cross_attn_metadata, cross_kv_caches, cross_slot_mapping)
    meta, caches, slots_T = _batch_of(query, causal, own, cross)
    if compiling:
        guard_hooks(module)
        options["causal"] = causal  # eager has checked it; fewer options make a faster call
    q_TNH = _rows(query)
    if caches is None:
        out_TNH = varlen_attention(q_TNH, _rows(key), _rows(value), meta, scale, **options)
        return out_TNH.unsqueeze(0), None
    if has_latent(module):
        check_keeps_latent(module)
        _refuse_features(module, options)
        latents = (_rows(value)[:, 0], _rows(key)[:, 0])
        slots = slots_of_layer(slots_T, False, meta)
        batch, asked = (meta, _cache_of(module, caches), slots), options.get("causal")
        out = latent_attention(module, q_TNH, latents, batch, scale, kv_cache_dtype, asked)
        return out.unsqueeze(0), None
    check_layout(tables, query, meta)
    stored = _storage(module, kv_cache_dtype)
    chunk = chunk_size(module) if causal else None
    windowed = options["sliding_window"] is not None or chunk is not None
    batch = (meta, caches, slots_of_layer(slots_T, windowed, meta))
    kv_cache = _written_cache(module, key, value, batch, stored)
    options |= {"attention_chunk_size": chunk, **stored}
    return attention(q_TNH, kv_cache, meta, scale, **options).unsqueeze(0), None


def _probed_call(
    probe: AttentionProbe, module: Any, qkv: tuple[torch.Tensor, ...], *asked: Any
) -> ProbedCall:
    """The call as a probe gets it; `asked` are the fields from `spec` to `extras`."""
    query, key, value = qkv
    latent = None
    if has_latent(module):
        check_keeps_latent(module)
        latent = _rows(value)[:, 0]
        key, value = expanded(module, value, key)
    q, k, v = (_rows(x) for x in (query, key, value))
    name, cache = probe.name(module), cache_index(module)
    return ProbedCall(name, module, cache, q, k, v, *asked, latent=latent)


def _batch_of(
    query: torch.Tensor, causal: bool, own: Batch, cross: Batch
) -> tuple[AttentionMetadata, Sequence[torch.Tensor] | None, SlotMapping | None]:
    """The metadata, caches and slots that a layer attends with: its model's, or the encoder's.

    Raises:
        ValueError: they are missing, or not for such a layer; query has a batch dimension.
    """
    if query.shape[0] != 1:
        raise ValueError(
            f"input_ids must have shape [1, num_tokens], got a batch dimension of {query.shape[0]}"
        )
    if not causal and cross[1] is not None:
        name, (meta, caches, slots_T) = "cross_attn_metadata", cross
    else:
        name, (meta, caches, slots_T) = "attn_metadata", own
        _refuse_missing(causal, meta, caches)
    if meta is None:
        raise ValueError(f"{name} must be an AttentionMetadata with its caches, got None")
    _check_batch(name, causal, meta)
    return meta, caches, slots_T


def _spec_of_call(
    module: Any, query: torch.Tensor, key: torch.Tensor, causal: bool, options: dict[str, Any]
) -> AttentionSpec:
    """The geometry that a call asks for."""
    if has_latent(module):
        _refuse_features(module, options)
        sizes = (query.shape[1], latent_shape(module), query.dtype)
        return AttentionSpec.of_latent(*sizes, causal=causal)
    return AttentionSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[3],
        dtype=query.dtype,
        causal=causal,
        attention_chunk_size=chunk_size(module) if causal else None,
        **spec_fields(options),
    )


def _refuse_features(module: Any, options: dict[str, Any]) -> None:
    """Raise a ValueError for features of a layer with latent attention."""
    asked = [name for name, value in options.items() if name != "causal" and value is not None]
    if asked:
        raise ValueError(
            f"{type(module).__name__} must ask for no features besides latent attention, got "
            f"{', '.join(asked)}"
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, H] as [T, heads, H].

    Transpose before squeeze: the other order makes Inductor guard on T > 1
    (torch 2.13, _compute_stride).
    """
    return x.transpose(1, 2).squeeze(0)


def _written_cache(
    module: Any, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch, stored: dict[str, Any]
) -> torch.Tensor:
    """The cache that the layer reads; key and value are in it, unless it shares another's."""
    meta, caches, slots_T = batch
    kv_cache = _cache_of(module, caches)
    if not shares_cache(module):
        write_kv(_rows(key), _rows(value), kv_cache, meta, slot_mapping=slots_T, **stored)
    return kv_cache


def _cache_of(module: Any, caches: Sequence[torch.Tensor]) -> torch.Tensor:
    index = cache_index(module)
    if len(caches) <= index:
        raise ValueError(
            "kv_caches must hold one cache for each layer that shares no other's, "
            f"got {len(caches)} for layer {module.layer_idx}, which takes number {index}"
        )
    if torch.compiler.is_compiling():
        _share_size(caches[: index + 1])
    return caches[index]


def _share_size(caches: Sequence[torch.Tensor]) -> None:
    """Let the last cache have the number of blocks of another one, if it is the same.

    Where numbers of blocks are symbols, each cache has its own, and no layer is equal to another. A
    comparison guards on the outcome, so that torch has one symbol for both.
    """
    size = caches[-1].shape[0]
    for other in caches[:-1]:
        if other.shape[0] == size:
            return


def _storage(module: Any, kv_cache_dtype: str) -> dict[str, Any]:
    """How the layer's cache is stored: in FP8 with the module's scales, or in the model's dtype."""
    if kv_cache_dtype == "auto":
        return {}
    scales = {name: getattr(module, name, None) for name in ("k_scale", "v_scale")}
    return {"kv_cache_dtype": kv_cache_dtype, **scales}


def _refuse_missing(
    causal: bool, meta: AttentionMetadata | None, caches: Sequence[torch.Tensor] | None
) -> None:
    """Raise a ValueError unless the layer got a batch, and caches if and only if it is causal."""
    if meta is None or (causal and caches is None):
        raise KeywordsMissing(meta, caches)
    if not causal and caches is not None:
        raise ValueError(
            "is_causal must be True with kv_caches, got False; supported: causal attention, "
            "encoders without kv_caches, cross-attention with cross_kv_caches"
        )


def _check_batch(name: str, causal: bool, meta: AttentionMetadata) -> None:
    """Raise a ValueError unless the batch is causal as the layer is, before anything is written.

    A traced graph cannot read the batch; there the operators check, by their argument `causal`.
    """
    if torch.compiler.is_compiling():
        return
    got = meta.common.causal if isinstance(meta, AttentionMetadata) else None
    if got not in (None, causal):  # the operators refuse other types than AttentionMetadata
        raise ValueError(f"{name} must have common.causal {causal} for this layer, got {got}")


def _refuse_ignored(
    attention_mask: torch.Tensor | None, dropout: float, extras: dict[str, Any]
) -> None:
    """Raise a ValueError for what the operators do not compute, instead of wrong results."""
    if attention_mask is not None:
        raise ValueError(
            "attention_mask must be None with attn_implementation='attn_ops', got a tensor"
        )
    if dropout:
        raise ValueError(f"dropout must be 0 (inference), got {dropout}; call model.eval()")
    if extras.get("position_bias") is not None:
        raise ValueError("position_bias must be None, got a tensor; supported: no position bias")
