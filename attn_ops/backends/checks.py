"""What is asked of a layer, its cache and its batch before a backend computes it.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import torch

from attn_ops.metadata import (
    AttentionMetadata,
    AttentionOptions,
    AttentionSpec,
    LatentOptions,
    LatentShape,
)
from attn_ops.metadata.validation import check_blocks


def check_layer(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions | LatentOptions,
) -> AttentionSpec:
    """The geometry of a layer; a ValueError unless its tensors fit and the backend supports it.

    Of latent attention q is [T, N, P + R] and kv_cache [P, B, Lkv + R].
    """
    _check_dimensions(q, kv_cache, options)
    if q.device != kv_cache.device or q.device != meta.common.device:
        raise ValueError(
            "q, kv_cache and attn_metadata must be on one device, "
            f"got {q.device}, {kv_cache.device} and {meta.common.device}"
        )
    if q.shape[0] < meta.common.num_actual_tokens:
        raise ValueError(
            f"q must have at least {meta.common.num_actual_tokens} rows, got {q.shape[0]}"
        )
    if options.kv_cache_dtype == "auto" and q.dtype != kv_cache.dtype:
        raise ValueError(f"q must have the cache's dtype {kv_cache.dtype}, got {q.dtype}")
    if isinstance(options, LatentOptions):
        latent = _checked_shape(q, kv_cache, options)
        check_latent_cache(kv_cache, meta, q.dtype, options.kv_cache_dtype, latent)
    else:
        check_cache(kv_cache, meta, q.dtype, options.kv_cache_dtype)
        heads, head_size = kv_cache.shape[3:]
        if q.shape[2] != head_size:
            raise ValueError(f"q must have the cache's head size {head_size}, got {q.shape[2]}")
        if q.shape[1] == 0 or q.shape[1] % heads:
            raise ValueError(f"q must have a multiple of {heads} heads, got {q.shape[1]}")
    spec = spec_of(q, kv_cache, options, meta.common.causal)
    check_supported(spec, kv_cache, meta)
    if kv_cache.is_cpu:  # the host sees the table
        size, lengths = spec.block_size_of(kv_cache), meta.common.seq_lens.numpy()
        check_blocks(meta.common, lengths, kv_cache.shape[0], size)
    if options.lse is not None and not meta.backend.support.lse:
        raise ValueError(
            f"backend {meta.backend.name} cannot return the log-sum-exp; call attention()"
        )
    return spec


def spec_of(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    options: AttentionOptions | LatentOptions,
    causal: bool,
) -> AttentionSpec:
    """Geometry of a layer, as the builder was given it; a ValueError for other dimensions."""
    _check_dimensions(q, kv_cache, options)
    if isinstance(options, LatentOptions):
        return latent_spec(q, kv_cache, options, causal)
    return options.spec(q, kv_cache, causal)


def _check_dimensions(
    q: torch.Tensor, kv_cache: torch.Tensor, options: AttentionOptions | LatentOptions
) -> None:
    check_query(q)
    if isinstance(options, LatentOptions):
        check_latent_cache_shape(kv_cache)
    else:
        check_cache_shape(kv_cache)


def latent_spec(
    q: torch.Tensor, kv_cache: torch.Tensor, options: LatentOptions, causal: bool
) -> AttentionSpec:
    """Geometry of a layer with latent attention, as the builder was given it."""
    return AttentionSpec.of_latent(
        q.shape[1],
        options.shape_of(q, kv_cache),
        q.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        causal=causal,
    )


def _checked_shape(q: torch.Tensor, kv_cache: torch.Tensor, options: LatentOptions) -> LatentShape:
    """Sizes of the layer; a ValueError unless `kv_b` fits q and the cache."""
    kv_b = options.kv_b
    if kv_b.dim() != 2 or kv_b.dtype != q.dtype or kv_b.device != q.device:
        raise ValueError(
            "kv_b must have shape [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank] and "
            f"q's dtype {q.dtype} on {q.device}, got {kv_b.dtype} {list(kv_b.shape)} "
            f"on {kv_b.device}"
        )
    latent = options.shape_of(q, kv_cache)
    rows = q.shape[1] * (latent.qk_nope_head_dim + latent.v_head_dim)
    if q.shape[1] == 0 or kv_b.shape[0] != rows:
        raise ValueError(
            f"kv_b must have {rows} rows for {q.shape[1]} heads and {latent}, got {kv_b.shape[0]}"
        )
    return latent


def check_latent_cache_shape(kv_cache: torch.Tensor) -> None:
    """Raise a ValueError unless kv_cache is [P, B, Lkv + R]."""
    if kv_cache.dim() != 3 or 0 in kv_cache.shape[1:]:
        raise ValueError(
            "kv_cache must have shape [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], "
            f"got {list(kv_cache.shape)}"
        )


def check_latent_cache(
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    dtype: torch.dtype,
    kv_cache_dtype: str,
    latent: LatentShape,
) -> None:
    """`check_cache` of latent attention; `latent` may have any number of heads' sizes."""
    check_latent_cache_shape(kv_cache)
    if meta.block_size is not None and kv_cache.shape[1] != meta.block_size:
        raise ValueError(
            f"kv_cache must have the metadata's block_size {meta.block_size}, "
            f"got {kv_cache.shape[1]}"
        )
    spec = AttentionSpec.of_latent(1, latent, dtype, kv_cache_dtype=kv_cache_dtype)
    if kv_cache.dtype != spec.cache_dtype or kv_cache.shape[2] != spec.head_size:
        raise ValueError(
            f"kv_cache must be {spec.cache_dtype} with {spec.head_size} numbers a token for "
            f"{latent}, {dtype} and kv_cache_dtype {kv_cache_dtype}, "
            f"got {kv_cache.dtype} with {kv_cache.shape[2]}"
        )
    check_supported(spec, kv_cache, meta)


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
    block_size = spec.block_size_of(kv_cache)
    reasons = meta.backend.support.reasons_against(spec, block_size, kv_cache.device)
    if reasons:
        raise ValueError(f"backend {meta.backend.name} cannot run this layer: {'; '.join(reasons)}")
