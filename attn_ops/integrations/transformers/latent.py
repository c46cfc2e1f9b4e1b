"""Latent attention (MLA) of Transformers' models, which stay as they are.

A model expands a token's latent to a key and a value a head, by `kv_b_proj`, in its method
`expand_kv`. A paged cache holds the latent, and attention expands it, or attends over it. So the
method is replaced in each layer: attention is given the rotated key and the latent instead. Norms,
RoPE and scales remain the model's own code, and parameters keep their names.

T rows of the batch, N query heads, Lkv latent, P and R head size without and with RoPE, V that of
values.
"""

import types
from typing import Any

import torch

from attn_ops.integrations.transformers.layers import NAME, features, shares_cache
from attn_ops.integrations.transformers.probe import ProbedCall
from attn_ops.latent_weights import expansion, is_plain
from attn_ops.metadata import AttentionMetadata, LatentShape
from attn_ops.ops import mla_attention, write_mla_kv

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def latent_shape(layer: Any) -> LatentShape:
    """The sizes of a layer that `has_latent`."""
    return LatentShape(*(getattr(layer, name) for name in _SIZES))


def keep_latent(layer: Any) -> None:
    """Give attention the latents of the layer, unexpanded; harmless if repeated.

    Raises:
        ValueError: its attention is not what the operators compute.
    """
    _check(layer)
    if not _keeps_latent(layer):
        layer.expand_kv = types.MethodType(expand_kv, layer)


def expand_kv(
    self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's method of that name: expand nothing, if attn_ops attends.

    Args:
        kv_nope: [1, 1, T, Lkv], the latent.
        k_rot: [1, 1, T, R].

    Returns:
        k_rot and kv_nope, in place of key and value.
    """
    if self.config._attn_implementation != NAME:
        return expanded(self, kv_nope, k_rot)
    return k_rot, kv_nope


def expanded(
    layer: Any, latent: torch.Tensor, k_rot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key [1, N, T, P + R] and value [1, N, T, V], as the model expands them."""
    return type(layer).expand_kv(layer, latent, k_rot)


def latent_attention(
    layer: Any,
    q_TNH: torch.Tensor,
    latents: tuple[torch.Tensor, torch.Tensor],
    batch: tuple[AttentionMetadata, torch.Tensor, torch.Tensor | None],
    scale: float,
    kv_cache_dtype: str,
    causal: bool | None,
) -> torch.Tensor:
    """Write a layer's latents and attend over the cache.

    The scale of an FP8 cache is the layer's `kv_scale`, if it has one.

    Args:
        q_TNH: [T, N, P + R].
        latents: [T, Lkv] and, rotated, [T, R].
        batch: metadata, the layer's cache [num_blocks, block_size, Lkv + R] and slots.
        causal: as `mla_attention` takes it.

    Returns:
        [T, N, V].
    """
    meta, kv_cache, slots_T = batch
    stored: dict[str, Any] = {}
    kv_scale = None
    if kv_cache_dtype != "auto":
        stored, kv_scale = {"kv_cache_dtype": kv_cache_dtype}, getattr(layer, "kv_scale", None)
    write_mla_kv(*latents, kv_cache, meta, slot_mapping=slots_T, scale=kv_scale, **stored)
    kv_b = expansion(layer.kv_b_proj, latents[0])
    return mla_attention(
        q_TNH, kv_cache, meta, kv_b, scale,
        v_head_dim=layer.v_head_dim, kv_scale=kv_scale, causal=causal, **stored,
    )  # fmt: skip


def check_keeps_latent(layer: Any) -> None:
    """Raise a ValueError unless the layer was prepared; a traced graph does not ask."""
    if not torch.compiler.is_compiling() and not _keeps_latent(layer):
        raise ValueError(
            "layers with latent attention must be prepared by attention_specs(model), "
            f"got {type(layer).__name__} as it was made"
        )


def check_expansion(call: ProbedCall) -> None:
    """Raise a ValueError unless attention makes the layer's own keys and values of its latent."""
    if call.latent is None:
        return
    shape, linear = latent_shape(call.layer), call.layer.kv_b_proj
    kv_b = expansion(linear, call.latent)
    heads_TNE = (call.latent @ kv_b.t()).unflatten(1, (call.q.shape[1], -1))
    k_TNP, v_TNV = heads_TNE.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=2)
    k_pe_TNR = call.k[:, :1, shape.qk_nope_head_dim :].expand(-1, call.q.shape[1], -1)
    exact = call.q.dtype in (torch.float32, torch.float64)
    tolerance = (1e-3 if exact else 5e-2) if is_plain(linear) else 0.25  # x may be in FP8
    pairs = (("keys", call.k, torch.cat((k_TNP, k_pe_TNR), dim=2)), ("values", call.v, v_TNV))
    for what, got, wanted in pairs:
        if got.shape != wanted.shape or _distance(got, wanted) > tolerance:
            raise ValueError(
                f"{what} of {call.name} must be those that kv_b_proj makes of its latent, with "
                f"{shape.qk_rope_head_dim} rotated columns of keys that all heads share, got others"
            )


def _keeps_latent(layer: Any) -> bool:
    replaced = vars(layer).get("expand_kv")
    return getattr(replaced, "__func__", None) is expand_kv


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of two tensors, as a part of the length of the second."""
    difference = (got.float() - wanted.float()).norm()
    return float(difference / wanted.float().norm().clamp(min=1e-30))


def _check(layer: Any) -> None:
    """Raise a ValueError unless the operators compute what such a layer asks for."""
    name = type(layer).__name__
    if getattr(layer, "indexer", None) is not None or getattr(layer, "skip_topk", False):
        raise ValueError(
            "layers with latent attention must attend to all keys, "
            f"got {name}, which selects keys by an indexer"
        )
    if shares_cache(layer):
        raise ValueError(
            "layers with latent attention must have KV caches of their own, "
            f"got {name}, which shares another's"
        )
    asked = [what for what, value in features(layer).items() if value is not None]
    if asked:
        raise ValueError(
            f"layers with latent attention must have no {', '.join(asked)}, got {name} with it"
        )
    _check_weight(name, layer)


def _check_weight(name: str, layer: Any) -> None:
    shape, linear = latent_shape(layer), layer.kv_b_proj
    if getattr(linear, "bias", None) is not None:
        raise ValueError(f"kv_b_proj of {name} must have no bias, got one")
    num_heads = layer.num_heads // getattr(layer, "num_shards", 1)
    columns = num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    wanted = [columns, shape.kv_lora_rank]
    if not hasattr(linear, "weight"):
        return  # packed under another name: `check_expansion` compares what it computes
    got = list(linear.weight.shape)
    if got != wanted:
        raise ValueError(f"kv_b_proj.weight of {name} must have shape {wanted}, got {got}")
