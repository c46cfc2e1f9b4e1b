"""What the operators check of a cache and a batch before they run."""

import torch

from attn_ops.backends.base import AttentionOptions
from attn_ops.metadata import KV_CACHE_DTYPES, AttentionMetadata, AttentionSpec


def check_attention_inputs(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> None:
    """Raise a ValueError unless the tensors fit each other and the backend supports them.

    Asked in full once a step and geometry: the answer costs as much as a small kernel.
    """
    if not isinstance(meta, AttentionMetadata):
        raise ValueError(f"meta must be an AttentionMetadata, got {type(meta).__name__}")
    common = meta.common
    key = (
        q.shape,
        q.dtype,
        q.get_device(),
        kv_cache.shape,
        kv_cache.dtype,
        kv_cache.get_device(),
        common.num_actual_tokens,
        common.causal,
        options.sliding_window,
        options.soft_cap,
        options.kv_cache_dtype,
        options.lse is None,
        options.alibi_slopes is None,
        options.sinks is None,
    )
    if key not in meta.supported:
        _check_shapes(q, kv_cache, meta, options)
        meta.supported.add(key)
    if options.alibi_slopes is not None:
        check_vector("alibi_slopes", options.alibi_slopes, q.shape[1], q.device)
    if options.sinks is not None:
        check_vector("sinks", options.sinks, q.shape[1], q.device, q.dtype)
    if options.k_scale is not None or options.v_scale is not None:
        check_scales(options.k_scale, options.v_scale, q.device)


def _check_shapes(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> None:
    check_query(q)
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
    if q.device != kv_cache.device or q.device != meta.common.device:
        raise ValueError(
            "q, kv_cache and attn_metadata must be on one device, "
            f"got {q.device}, {kv_cache.device} and {meta.common.device}"
        )
    if plain and q.dtype != kv_cache.dtype:
        raise ValueError(f"q must have the cache's dtype {kv_cache.dtype}, got {q.dtype}")
    check_supported(options.spec(q, kv_cache, meta.common.causal), kv_cache, meta)
    if options.lse is not None and not meta.backend.support.lse:
        raise ValueError(
            f"backend {meta.backend.name} cannot return the log-sum-exp; call attention()"
        )


def check_query(q: torch.Tensor) -> None:
    """Raise a ValueError unless q has three dimensions."""
    if q.dim() != 3:
        raise ValueError(
            f"q must have shape [num_tokens, num_heads, head_size], got {list(q.shape)}"
        )


def check_v_head_size(v_head_size: int, head_size: int, of: str) -> None:
    """Raise a ValueError unless values may have `v_head_size` columns of `of`'s `head_size`."""
    if not 1 <= v_head_size <= head_size:
        raise ValueError(
            f"v_head_size must be from 1 to {of}'s head size {head_size}, got {v_head_size}"
        )


def check_causal(meta: AttentionMetadata, causal: bool) -> None:
    """Raise a ValueError unless the batch is causal as the layer is."""
    if isinstance(meta, AttentionMetadata) and meta.common.causal != causal:
        names = {True: "causal", False: "non-causal"}
        raise ValueError(
            f"attn_metadata must be {names[causal]} for this layer, "
            f"got {names[bool(meta.common.causal)]} metadata"
        )


def check_vector(
    name: str,
    vector: torch.Tensor | None,
    length: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise unless `vector` is None or [length] float32 or `dtype` on `device`, contiguous."""
    if vector is None:
        return
    dtypes = dict.fromkeys((torch.float32, dtype))
    if vector.dtype not in dtypes or vector.shape != (length,):
        raise ValueError(
            f"{name} must be {' or '.join(map(str, dtypes))} of shape [{length}], "
            f"got {vector.dtype} {list(vector.shape)}"
        )
    if not vector.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {vector.stride(0)}")
    if vector.device != device:
        raise ValueError(f"{name} must be on {device}, got {vector.device}")


def check_scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, device: torch.device
) -> None:
    """Raise a ValueError unless the scales of an FP8 cache are None or [1] float32 on `device`."""
    check_vector("k_scale", k_scale, 1, device)
    check_vector("v_scale", v_scale, 1, device)


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
    """Raise a ValueError unless `kv_cache` is one that `meta` was made for.

    `dtype` is that of q, k and v. Called before the cache is written, so that a backend that cannot
    read it refuses the write.
    """
    if not isinstance(meta, AttentionMetadata):
        raise ValueError(f"meta must be an AttentionMetadata, got {type(meta).__name__}")
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
    """Raise a ValueError unless the batch's backend takes layers of geometry `spec`.

    Asked once a step and geometry: the answer costs more than a small kernel.
    """
    key = (spec, kv_cache.shape[2])
    if key in meta.supported:
        return
    reasons = meta.backend.support.reasons_against(spec, kv_cache.shape[2], kv_cache.device)
    if reasons:
        raise ValueError(f"backend {meta.backend.name} cannot run this layer: {'; '.join(reasons)}")
    meta.supported.add(key)
