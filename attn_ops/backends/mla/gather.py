"""Latents of the paged cache, one request after the other.

S requests, M blocks a request may own, P blocks, B block size, Lkv latent, R head size with RoPE.
"""

import torch

from attn_ops.backends.triton import converts_e4m3


def by_triton(kv_cache: torch.Tensor, fp8: torch.dtype | None) -> bool:
    """Whether our kernels read and write latents of the cache: not all GPUs convert E4M3."""
    if not kv_cache.is_cuda or kv_cache.dtype == torch.float64 or kv_cache.stride(2) != 1:
        return False
    return fp8 != torch.float8_e4m3fn or converts_e4m3(kv_cache.device)


def gather_latents(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seq_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    kv_scale: torch.Tensor | None = None,
    fp8: torch.dtype | None = None,
) -> None:
    """Write a part of each request's latents to `out`, without reading the device.

    Args:
        kv_cache: [P, B, Lkv + R], or uint8 with `fp8`.
        block_table: [S, M] int32.
        cu_seq_lens: [S + 1] int32: row of `out` where each request begins, and where all end; rows
            behind that stay.
        seq_starts: [S] int32: position of each request's first token, anywhere in a page.
        out: [any, Lkv + R], written.
        kv_scale: [1] float32: an FP8 cache means stored * kv_scale; None is 1.
        fp8: dtype of an FP8 cache.
    """
    gather = reference_gather_latents
    if by_triton(kv_cache, fp8) and out.stride(1) == 1:
        from attn_ops.backends.mla.triton.gather import gather_latents as gather
    gather(kv_cache, block_table, cu_seq_lens, seq_starts, out, kv_scale=kv_scale, fp8=fp8)


def reference_gather_latents(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seq_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    kv_scale: torch.Tensor | None = None,
    fp8: torch.dtype | None = None,
) -> None:
    """`gather_latents` in plain PyTorch."""
    (num_reqs, max_blocks), block_size = block_table.shape, kv_cache.shape[1]
    if 0 in (num_reqs, max_blocks, *out.shape):
        return
    row_T = torch.arange(out.shape[0], dtype=cu_seq_lens.dtype, device=out.device)
    request_T = torch.searchsorted(cu_seq_lens[1:].contiguous(), row_T, right=True)
    owned_T = request_T < num_reqs
    request_T = request_T.clamp(max=num_reqs - 1)
    position_T = row_T - cu_seq_lens[request_T] + seq_starts[request_T]
    index_T = position_T.div(block_size, rounding_mode="floor").clamp(0, max_blocks - 1)
    block_T = torch.where(owned_T, block_table[request_T, index_T].long(), 0)
    latent_TL = kv_cache[block_T, position_T % block_size]
    if fp8 is not None:
        latent_TL = latent_TL.contiguous().view(fp8).to(torch.promote_types(out.dtype, torch.float))
        latent_TL = latent_TL if kv_scale is None else latent_TL * kv_scale
    out.copy_(torch.where(owned_T.unsqueeze(1), latent_TL.to(out.dtype), out))
