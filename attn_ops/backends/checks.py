"""What is asked of a layer, its cache and its batch before a backend computes it.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import torch

from attn_ops.metadata import KV_CACHE_DTYPES, AttentionMetadata, AttentionOptions, AttentionSpec


def check_layer(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> AttentionSpec:
    """The geometry of a layer; a ValueError unless its tensors fit and the backend supports it."""
    check_query(q)
    if q.device != kv_cache.device or q.device != meta.common.device:
        raise ValueError(
            "q, kv_cache and attn_metadata must be on one device, "
            f"got {q.device}, {kv_cache.device} and {meta.common.device}"
        )
    plain = options.kv_cache_dtype == "auto"
    check_cache(kv_cache, meta, kv_cache.dtype if plain else q.dtype, options.kv_cache_dtype)
    if q.shape[2] != kv_cache.shape[4]:
        raise ValueError(f"q must have the cache's head size {kv_cache.shape[4]}, got {q.shape[2]}")
    if q.shape[1] == 0 or q.shape[1] % kv_cache.shape[3]:
        raise ValueError(f"q must have a multiple of {kv_cache.shape[3]} heads, got {q.shape[1]}")
    if q.shape[0] < meta.common.num_actual_tokens:
        raise ValueError(
            f"q must have at least {meta.common.num_actual_tokens} rows, got {q.shape[0]}"
        )
    if plain and q.dtype != kv_cache.dtype:
        raise ValueError(f"q must have the cache's dtype {kv_cache.dtype}, got {q.dtype}")
    spec = options.spec(q, kv_cache, meta.common.causal)
    check_supported(spec, kv_cache, meta)
    if options.lse is not None and not meta.backend.support.lse:
        raise ValueError(
            f"backend {meta.backend.name} cannot return the log-sum-exp; call attention()"
        )
    return spec


def check_query(q: torch.Tensor) -> None:
    """Raise a ValueError unless q has three dimensions."""
    if q.dim() != 3:
        raise ValueError(
            f"q must have shape [num_tokens, num_heads, head_size], got {list(q.shape)}"
        )


def check_cache_shape(kv_cache: torch.Tensor) -> None:
    """Raise a ValueError unless kv_cache is [P, 2, B, K, H]."""
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2 or 0 in kv_cache.shape[2:]:
        raise ValueError(
            "kv_cache must have shape [num_blocks, 2, block_size, num_kv_heads, head_size], "
            f"got {list(kv_cache.shape)}"
        )


def check_cache(
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
) -> None:
    """Raise a ValueError unless `meta` was made for such a cache; `dtype` is that of q."""
    if not meta.paged:
        raise ValueError(
            "meta must be that of a paged batch with a KV cache, got varlen_metadata's; "
            "supported with it: varlen_attention"
        )
    check_cache_shape(kv_cache)
    if meta.block_size is not None and kv_cache.shape[2] != meta.block_size:
        raise ValueError(
            f"kv_cache must have the metadata's block_size {meta.block_size}, "
            f"got {kv_cache.shape[2]}"
        )
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype must be known, got {kv_cache_dtype!r}; "
            f"supported: {', '.join(KV_CACHE_DTYPES)}"
        )
    heads, head_size = kv_cache.shape[3:]
    spec = AttentionSpec(heads, heads, head_size, dtype, kv_cache_dtype=kv_cache_dtype)
    if kv_cache.dtype != spec.cache_dtype:
        raise ValueError(
            f"kv_cache must have dtype {spec.cache_dtype} for {dtype} and kv_cache_dtype "
            f"{kv_cache_dtype}, got {kv_cache.dtype}"
        )
    check_supported(spec, kv_cache, meta)


def check_supported(spec: AttentionSpec, kv_cache: torch.Tensor, meta: AttentionMetadata) -> None:
    """Raise a ValueError unless the batch's backend takes layers of geometry `spec`."""
    reasons = meta.backend.support.reasons_against(spec, kv_cache.shape[2], kv_cache.device)
    if reasons:
        raise ValueError(f"backend {meta.backend.name} cannot run this layer: {'; '.join(reasons)}")
