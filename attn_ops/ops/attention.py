"""`attn_ops::attention`: paged attention as a functional operator.

T tokens, N query heads, K kv heads, H head size, P physical blocks, B block size.
"""

import torch

from attn_ops.metadata import METADATA_TYPE, AttentionMetadata, AttentionSpec
from attn_ops.ops.checks import check_cache, check_supported
from attn_ops.ops.library import LIBRARY

LIBRARY.define(
    f"attention(Tensor q, Tensor kv_cache, {METADATA_TYPE} meta, float scale, *, "
    "int? sliding_window=None, float? soft_cap=None) -> Tensor"
)


@torch.library.impl(LIBRARY, "attention", "CompositeExplicitAutograd")
def _attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    check_attention_inputs(q, kv_cache, meta, sliding_window, soft_cap)
    return meta.backend.forward(q, kv_cache, meta, scale, sliding_window, soft_cap)


@torch.library.register_fake("attn_ops::attention", lib=LIBRARY)
def _attention_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    return q.new_empty(q.shape)


def check_attention_inputs(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Raise a ValueError unless the tensors fit each other and the backend supports them."""
    if q.dim() != 3:
        raise ValueError(
            f"q must have shape [num_tokens, num_heads, head_size], got {list(q.shape)}"
        )
    check_cache(kv_cache, meta)
    if q.shape[2] != kv_cache.shape[4]:
        raise ValueError(f"q must have the cache's head size {kv_cache.shape[4]}, got {q.shape[2]}")
    if q.shape[1] % kv_cache.shape[3]:
        raise ValueError(f"q must have a multiple of {kv_cache.shape[3]} heads, got {q.shape[1]}")
    if q.shape[0] < meta.common.num_actual_tokens:
        raise ValueError(
            f"q must have at least {meta.common.num_actual_tokens} rows, got {q.shape[0]}"
        )
    if q.device != kv_cache.device or q.device != meta.common.device:
        raise ValueError(
            "q, kv_cache and attn_metadata must be on one device, "
            f"got {q.device}, {kv_cache.device} and {meta.common.device}"
        )
    if q.dtype != kv_cache.dtype:
        raise ValueError(f"q must have the cache's dtype {kv_cache.dtype}, got {q.dtype}")
    heads, head_size = q.shape[1:]
    spec = AttentionSpec(heads, kv_cache.shape[3], head_size, q.dtype, sliding_window, soft_cap)
    check_supported(spec, kv_cache, meta)


def attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of the batch's query rows over the paged cache, by the backend that `meta` names.

    Args:
        q: [T, N, H]. Rows from `meta.common.num_actual_tokens` on are padding.
        kv_cache: [P, 2, B, K, H]; this step's keys and values are already written.
        meta: the batch, from a backend's `AttentionMetadataBuilder`.
        scale: factor on q.k, usually H ** -0.5.
        sliding_window: keys a query sees, its own included; None sees all.
        soft_cap: c in c * tanh(s / c) on the scaled scores (Gemma 2); None for none.

    Returns:
        [T, N, H], contiguous, in q's dtype. Padding rows are zero.

    Raises:
        ValueError: shapes or devices do not fit, or the backend does not support the configuration.
    """
    return torch.ops.attn_ops.attention(
        q, kv_cache, meta, scale, sliding_window=sliding_window, soft_cap=soft_cap
    )
