"""What the operators check of a cache and a batch before they run."""

import torch

from attn_ops.metadata import AttentionMetadata, AttentionSpec


def check_cache(kv_cache: torch.Tensor, meta: AttentionMetadata) -> None:
    """Raise a ValueError unless `kv_cache` is one that `meta` was made for.

    Called before the cache is written, so that a backend that cannot read it refuses the write.
    """
    if not isinstance(meta, AttentionMetadata):
        raise ValueError(f"meta must be an AttentionMetadata, got {type(meta).__name__}")
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise ValueError(
            "kv_cache must have shape [num_blocks, 2, block_size, num_kv_heads, head_size], "
            f"got {list(kv_cache.shape)}"
        )
    if meta.block_size is not None and kv_cache.shape[2] != meta.block_size:
        raise ValueError(
            f"kv_cache must have the metadata's block_size {meta.block_size}, "
            f"got {kv_cache.shape[2]}"
        )
    heads, head_size = kv_cache.shape[3:]
    check_supported(AttentionSpec(heads, heads, head_size, kv_cache.dtype), kv_cache, meta)


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
