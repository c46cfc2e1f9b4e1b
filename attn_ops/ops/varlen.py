"""`attn_ops::varlen_attention`: attention over this step's own keys, without a KV cache.

For encoders and for embedding models: nothing is kept between calls.

T tokens, N query heads, K kv heads, H head size, V head size of values.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch

from attn_ops.backends.base import OWN_MASK, Backend
from attn_ops.backends.checks import check_query
from attn_ops.backends.registry import backend_names, load_backend
from attn_ops.metadata import (
    PAD_SLOT_ID,
    AttentionMetadata,
    AttentionOptions,
    AttentionSpec,
    CommonAttentionMetadata,
)
from attn_ops.metadata.features import PER_HEAD, SCHEMA, FeatureArguments, options_key
from attn_ops.ops.checks import check_causal, check_per_head
from attn_ops.ops.library import operator


@operator(
    fake=lambda q, k, v, *call, **options: q.new_empty((*q.shape[:2], v.shape[2])),
    keywords=f"{SCHEMA}, bool? causal=None",
    tags=(torch.Tag.cudagraph_unsafe,),  # like attention
)
def _varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **options: Any,
) -> torch.Tensor:
    causal = options.pop("causal", None)
    asked = AttentionOptions(scale, **options)
    if causal is not None:
        check_causal(meta, causal)
    _check(q, k, v, meta, asked)
    assert meta.backend.varlen is not None, "refused by _check"
    return meta.backend.varlen(q, k, v, meta, asked)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> None:
    """Raise a ValueError unless the tensors fit each other and the backend supports them."""
    check_query(q)
    num_tokens, num_heads, head_size = q.shape
    for name, x, size in (("k", k, head_size), ("v", v, None)):
        if x.dim() != 3 or x.shape[0] != num_tokens or size not in (None, x.shape[2]):
            wanted = f"[{num_tokens}, num_kv_heads, {size or 'v_head_size'}]"
            raise ValueError(f"{name} must have shape {wanted}, got {list(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must be {q.dtype} on {q.device} as q, got {x.dtype} on {x.device}"
            )
    heads = k.shape[1]
    if v.shape[1] != heads or heads == 0 or num_heads == 0 or num_heads % heads:
        raise ValueError(
            f"k and v must have one number of heads that divides q's {num_heads}, "
            f"got {heads} and {v.shape[1]}"
        )
    if num_tokens < meta.common.num_actual_tokens or q.device != meta.common.device:
        raise ValueError(
            f"q must have at least {meta.common.num_actual_tokens} rows on {meta.common.device}, "
            f"got {num_tokens} on {q.device}"
        )
    check_per_head(PER_HEAD, options, q)
    key = ("varlen", q.shape, k.shape, v.shape, q.dtype, meta.common.causal, options_key(options))
    meta.once(key, lambda: _check_supported(q, k, v, meta, options))


def _check_supported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> None:
    """Raise a ValueError unless the batch's backend attends without a cache as the layer asks."""
    spec = options.geometry(q, k.shape[1], meta.common.causal)
    if spec.blocksparse is not None:
        raise ValueError("sparse_block_size must be None without a KV cache, got a number")
    backend = meta.backend
    if backend.varlen is None:
        raise ValueError(f"backend {backend.name} cannot attend without a KV cache")
    blocks = backend.support.block_sizes
    reasons = backend.support.reasons_against(spec, blocks[0] if blocks else 16, q.device)
    if v.shape[2] != q.shape[2] and not backend.support.varlen_v_head_size:
        reasons.append(f"v must have the head size of q, got {v.shape[2]}; supported: {q.shape[2]}")
    if reasons:
        raise ValueError(f"backend {backend.name} cannot run this layer: {'; '.join(reasons)}")


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    causal: bool | None = None,
    **features: Unpack[FeatureArguments],
) -> torch.Tensor:
    """Attention of each request's rows over its own rows of k and v; nothing is cached.

    Args:
        q: [T, N, H].
        k: [T, K, H].
        v: [T, K, V]; V is H unless the backend supports another.
        meta: the batch, from `varlen_metadata` or a builder; `meta.common.causal` says whether rows
            see later ones. Rows from `meta.common.num_actual_tokens` on are padding.
        scale, causal, and the features that a layer may ask for: see `attention`. Without
            causality a window is symmetric.

    Returns:
        [T, N, V], contiguous, in q's dtype. Padding rows are zero.

    Raises:
        ValueError: shapes or devices do not fit, or the backend does not support the configuration.
    """
    if features.pop("blocksparse", None) is not None:
        raise ValueError("blocksparse must be None without a KV cache, got a layout")
    return _varlen_attention(q, k, v, meta, scale, causal=causal, **features)


def varlen_metadata(
    lengths: Sequence[int],
    spec: AttentionSpec,
    device: torch.device | str = "cpu",
    *,
    num_padded_tokens: int | None = None,
    backend: str | None = None,
) -> AttentionMetadata:
    """The batch of sequences of `lengths` tokens, without a KV cache, for `varlen_attention`.

    Args:
        lengths: tokens of each request; its rows stand one request behind another.
        spec: geometry of a layer; `spec.causal` is the batch's. It has no chunks and no FP8 cache.
        device: where the batch lives.
        num_padded_tokens: rows of the batch, at least `sum(lengths)`.
        backend: by name; None takes the first that applies and has attention without a cache.

    Raises:
        ValueError: a length is negative, the spec asks for what needs a cache, or no backend
            supports the layers; reasons are listed.
    """
    for name, value, plain in (
        ("attention_chunk_size", spec.attention_chunk_size, None),
        ("blocksparse", spec.blocksparse, None),
        ("kv_cache_dtype", spec.kv_cache_dtype, "auto"),
    ):
        if value != plain:
            raise ValueError(f"{name} must be {plain} without a KV cache, got {value}")
    chosen = _backend_for(spec, torch.device(device), backend)
    common = CommonAttentionMetadata.from_lengths(
        lengths,
        lengths,
        torch.zeros(len(lengths), -(-max([1, *lengths]) // 16), dtype=torch.int32, device="cpu"),
        16,
        device,
        num_padded_tokens=num_padded_tokens,
    )
    common.slot_mapping.fill_(PAD_SLOT_ID)  # nothing is written
    common.causal = spec.causal
    return AttentionMetadata(common, chosen, paged=False)


def _backend_for(spec: AttentionSpec, device: torch.device, name: str | None) -> Backend:
    """The backend called `name`, or the first that can; TORCH first on a CPU."""
    names = backend_names() if name is None else [name]
    if device.type == "cpu":
        names.sort(key=lambda n: n != "TORCH")
    against = []
    for candidate_name in names:
        candidate, failed = load_backend(candidate_name)
        if candidate is None:
            against.append(f"{candidate_name}: {failed}")
            continue
        blocks = candidate.support.block_sizes
        reasons = candidate.reasons_against(spec, blocks[0] if blocks else 16, device)
        if candidate.varlen is None:
            reasons.append("it cannot attend without a KV cache")
        if name is None and candidate.support.own_mask:
            reasons.append(OWN_MASK)
        if not reasons:
            return candidate
        against.append(f"{candidate.name}: {', '.join(reasons)}")
    raise ValueError(
        f"backend must support these layers without a KV cache, got none: {'; '.join(against)}"
    )
