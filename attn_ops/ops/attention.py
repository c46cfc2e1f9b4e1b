"""`attn_ops::attention`: paged attention as a functional operator, and with the log-sum-exp.

T tokens, N query heads, K kv heads, H head size, P physical blocks, B block size.
"""

import torch

from attn_ops.backends.base import AttentionOptions
from attn_ops.metadata import METADATA_TYPE, AttentionMetadata
from attn_ops.ops.checks import check_attention_inputs
from attn_ops.ops.library import LIBRARY

_ARGUMENTS = (
    f"Tensor q, Tensor kv_cache, {METADATA_TYPE} meta, float scale, *, "
    "int? sliding_window=None, float? soft_cap=None, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, str kv_cache_dtype='auto', Tensor? k_scale=None, Tensor? v_scale=None"
)
LIBRARY.define(f"attention({_ARGUMENTS}) -> Tensor")
LIBRARY.define(f"attention_with_lse({_ARGUMENTS}) -> (Tensor, Tensor)")


@torch.library.impl(LIBRARY, "attention", "CompositeExplicitAutograd")
def _attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **options: object,
) -> torch.Tensor:
    asked = AttentionOptions(scale, **options)  # pyright: ignore[reportArgumentType]
    check_attention_inputs(q, kv_cache, meta, asked)
    return meta.backend.forward(q, kv_cache, meta, asked)


@torch.library.register_fake("attn_ops::attention", lib=LIBRARY)
def _attention_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **options: object,
) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.impl(LIBRARY, "attention_with_lse", "CompositeExplicitAutograd")
def _attention_with_lse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    asked = AttentionOptions(scale, **options, lse=lse)  # pyright: ignore[reportArgumentType]
    check_attention_inputs(q, kv_cache, meta, asked)
    return meta.backend.forward(q, kv_cache, meta, asked), lse


@torch.library.register_fake("attn_ops::attention_with_lse", lib=LIBRARY)
def _attention_with_lse_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the batch's query rows over the paged cache, by the backend that `meta` names.

    Args:
        q: [T, N, H]. Rows from `meta.common.num_actual_tokens` on are padding.
        kv_cache: [P, 2, B, K, H]; this step's keys and values are already written. q's dtype, or
            uint8 with an FP8 `kv_cache_dtype`.
        meta: the batch, from a backend's `AttentionMetadataBuilder`.
        scale: factor on q.k, usually H ** -0.5.
        sliding_window: keys a query sees, its own included; None sees all.
        soft_cap: c in c * tanh(s / c) on the scaled scores (Gemma 2); None for none.
        alibi_slopes: [N] float32; scores are lowered by slope * |query - key| (arXiv:2108.12409).
        sinks: [N] float32 or q's dtype; a logit more in each head's softmax, of value 0 (GPT-OSS).
        kv_cache_dtype: auto, fp8_e4m3 or fp8_e5m2.
        k_scale, v_scale: [1] float32; what the cache holds stands for stored * scale. None is 1.

    Returns:
        [T, N, H], contiguous, in q's dtype. Padding rows are zero.

    Raises:
        ValueError: shapes or devices do not fit, or the backend does not support the configuration.
    """
    return torch.ops.attn_ops.attention(
        q,
        kv_cache,
        meta,
        scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def attention_with_lse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention`, and the log of every softmax's denominator, for merging partial results.

    Arguments and errors as of `attention`.

    Returns:
        [T, N, H] and [T, N] float32: log(sum(exp(score))), the sink included; -inf where a row sees
        no key and has no sink. Of padding rows it is -inf.
    """
    return torch.ops.attn_ops.attention_with_lse(q, kv_cache, meta, scale, **options)
