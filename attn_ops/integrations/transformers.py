"""Transformers models on attn_ops: `register()`, then `attn_implementation="attn_ops"`.

The model takes three more forward keywords, which Transformers hands down to every layer untouched:

    attn_metadata  AttentionMetadata, the batch
    kv_caches      per layer [num_blocks, 2, block_size, num_kv_heads, head_size]
    slot_mapping   [T] int64, optional: read from attn_metadata when it is not given

Tokens of all requests stand in one row: input_ids and position_ids are [1, T].
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes_config

from attn_ops.metadata import AttentionMetadata, AttentionSpec
from attn_ops.ops import attention, write_kv

NAME = "attn_ops"

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def register() -> None:
    """Make `attn_implementation="attn_ops"` known to Transformers; harmless if repeated."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)


def no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """The mask of a batch follows from its metadata; there is nothing to build.

    Raises:
        ValueError: the caller passed a mask, which would be ignored.
    """
    if attention_mask is not None:
        raise ValueError(
            "attention_mask must be None with attn_implementation='attn_ops'; "
            "pad nothing, pass attn_metadata"
        )


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attn_metadata: AttentionMetadata | None = None,
    kv_caches: Sequence[torch.Tensor] | None = None,
    slot_mapping: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of one layer, as Transformers calls it.

    query [1, N, T, H], key and value [1, K, T, H], s_aux the sinks [N] (GPT-OSS).

    Returns:
        [1, T, N, H] and None (no attention weights).
    """
    if attn_metadata is None or kv_caches is None:
        raise ValueError(
            "attn_metadata and kv_caches must be forward keywords of a model with "
            f"attn_implementation='attn_ops', got {type(attn_metadata).__name__} and "
            f"{type(kv_caches).__name__}"
        )
    if len(kv_caches) <= module.layer_idx:
        raise ValueError(
            f"kv_caches must hold one cache a layer, got {len(kv_caches)} for {module.layer_idx}"
        )
    _refuse_ignored(module, attention_mask, dropout, kwargs)
    if query.shape[0] != 1:
        raise ValueError(
            f"input_ids must have shape [1, num_tokens], got a batch dimension of {query.shape[0]}"
        )
    # Transposed before squeezed: the other order makes Inductor guard on T > 1
    # (torch 2.13, _compute_stride).
    q_TNH, k_TKH, v_TKH = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    kv_cache = kv_caches[module.layer_idx]
    write_kv(k_TKH, v_TKH, kv_cache, attn_metadata, slot_mapping=slot_mapping)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_TNH = attention(
        q_TNH,
        kv_cache,
        attn_metadata,
        scale,
        sliding_window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return out_TNH.unsqueeze(0), None


def _refuse_ignored(
    module: Any, attention_mask: torch.Tensor | None, dropout: float, extras: dict[str, Any]
) -> None:
    """Raise a ValueError for what the operators do not compute, instead of wrong results."""
    if attention_mask is not None:
        raise ValueError(
            "attention_mask must be None with attn_implementation='attn_ops', got a tensor"
        )
    if dropout:
        raise ValueError(f"dropout must be 0 (inference), got {dropout}; call model.eval()")
    if extras.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError("is_causal must be True, got False; supported: causal attention")
    if extras.get("position_bias") is not None:
        raise ValueError("position_bias must be None, got a tensor; supported: no position bias")


def attention_specs(model: Any) -> list[AttentionSpec]:
    """Geometry of each attention layer of a Transformers model, in the order of `layer_idx`.

    Raises:
        ValueError: the model was not built with `attn_implementation="attn_ops"`,
            or has no attention layers.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != NAME:
        raise ValueError(
            f"attn_implementation must be {NAME!r}, got {config._attn_implementation!r}; call "
            "attn_ops.integrations.transformers.register() and pass it to from_pretrained "
            "or from_config"
        )
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")]
    if not layers:
        raise ValueError(
            "model must have attention layers with layer_idx and scaling, "
            f"got {type(model).__name__}"
        )
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ValueError(
            f"layer_types must be supported, got {', '.join(sorted(unknown))}; "
            f"supported: {', '.join(sorted(_LAYER_TYPES))}"
        )
    layers.sort(key=lambda m: m.layer_idx)
    return [_spec(layer, config, model.dtype) for layer in layers]


def check_lengths(model: Any, max_tokens: int) -> None:
    """Refuse requests longer than the model's positions, and RoPE that changes with the batch.

    Transformers picks "dynamic" and "longrope" frequencies by the largest position of the batch.
    Here a batch holds several requests, so one would change the result of another; as long as no
    request is longer than the original context, the frequencies stay the same for all.

    Raises:
        ValueError: `max_tokens` is too large for the model.
    """
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or max_tokens
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [r for r in rope.values() if isinstance(r, dict)]
    for parameters in per_layer_type or [rope]:
        kind = parameters.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings") or longest
            if max_tokens > original:
                raise ValueError(
                    f"max_tokens must be at most {original} with rope_type {kind!r}, whose "
                    f"frequencies depend on the batch beyond it, got {max_tokens}"
                )
    if max_tokens > longest:
        raise ValueError(f"max_tokens must be at most the model's {longest}, got {max_tokens}")


@contextlib.contextmanager
def dynamic_batch(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    slot_mapping: torch.Tensor | None = None,
    logits_to_keep: torch.Tensor | None = None,
) -> Iterator[None]:
    """Call a compiled model for the first time inside, and no later batch recompiles it.

    Marks the sizes that change between steps as dynamic, and keeps Dynamo from taking a batch of
    one token for a special case. The tensors must not be views: Dynamo guards on their bases.
    """
    for tensor, dim in ((input_ids, 1), (position_ids, 1), (slot_mapping, 0), (logits_to_keep, 0)):
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, dim)
    with symbolic_shapes_config.patch(backed_size_oblivious=True):
        yield


def _spec(layer: Any, config: Any, dtype: torch.dtype) -> AttentionSpec:
    missing = [n for n in ("num_key_value_groups", "head_dim") if not hasattr(layer, n)]
    if missing:
        raise ValueError(
            f"attention layers must have {' and '.join(missing)}, got {type(layer).__name__}; "
            "supported: families built like Llama"
        )
    window = layer.sliding_window if hasattr(layer, "sliding_window") else _config_window(config)
    return AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads // layer.num_key_value_groups,
        head_size=layer.head_dim,
        dtype=dtype,
        sliding_window=window,
        soft_cap=getattr(layer, "attn_logit_softcapping", None),
        sinks=getattr(layer, "sinks", None) is not None,
    )


def _config_window(config: Any) -> int | None:
    """Mistral and Phi-3 read the window from the config, for every layer; Llama has none."""
    return getattr(config, "sliding_window", None)
