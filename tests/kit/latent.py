"""Batches of latent attention over poisoned caches.

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent,
P blocks, B block size.
"""

import dataclasses
from collections.abc import Sequence

import torch

from attn_ops import (
    AttentionMetadata,
    AttentionSpec,
    Backend,
    CommonAttentionMetadata,
    LatentShape,
    get_backend,
)
from attn_ops.metadata import LatentOptions, kv_dtype_of

SMALL = LatentShape(kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)


@dataclasses.dataclass
class LatentBatch:
    """A step's metadata and tensors; the cache is NaN wherever no token stands."""

    q: torch.Tensor  # [T, N, P + R]
    kv_c: torch.Tensor  # [T, Lkv]
    k_pe: torch.Tensor  # [T, R]
    kv_cache: torch.Tensor  # [P, B, Lkv + R]
    meta: AttentionMetadata
    kv_b: torch.Tensor  # [N * (P + V), Lkv]
    shape: LatentShape
    keywords: dict  # of `mla_attention`
    scale: float = 0.3

    @property
    def common(self) -> CommonAttentionMetadata:
        return self.meta.common

    @property
    def arguments(self) -> tuple:
        """What `mla_attention` is called with, besides `keywords`."""
        return (self.q, self.kv_cache, self.meta, self.kv_b, self.scale)

    def options(self, **changes) -> LatentOptions:
        return LatentOptions(self.scale, self.kv_b, **(self.keywords | changes))


def build_latent_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int = 3,
    shape: LatentShape = SMALL,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
    num_padding_rows: int = 0,
    backend: Backend | str = "TORCH_MLA",
    written: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **of_builder,
) -> LatentBatch:
    """A batch over a cache of shuffled blocks; `written`: this step's latents are in the cache."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    backend = get_backend(backend) if isinstance(backend, str) else backend
    width = max([1, *(-(-n // block_size) for n in seq_lens)])
    num_blocks = len(seq_lens) * width + 2
    owned = torch.randperm(num_blocks - 1, generator=generator)[: len(seq_lens) * width] + 1
    table_SM = owned.int().view(len(seq_lens), width)
    cache = torch.full((num_blocks, block_size, shape.cache_width), float("nan")).double()
    for blocks, query, tokens in zip(table_SM, query_lens, seq_lens, strict=True):
        for position in range(tokens if written else tokens - query):
            cache[blocks[position // block_size], position % block_size] = randn(shape.cache_width)
    fp8 = kv_dtype_of(kv_cache_dtype)
    cache = cache.to(dtype) if fp8 is None else cache.to(fp8).view(torch.uint8)
    rows = sum(query_lens) + num_padding_rows
    common = CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table_SM, block_size, device, num_padded_tokens=rows
    )
    q = randn(rows, num_heads, shape.qk_head_dim)
    q[sum(query_lens) :] = float("nan")
    spec = AttentionSpec.of_latent(num_heads, shape, dtype, kv_cache_dtype=kv_cache_dtype)
    builder = backend.builder(backend, [spec], block_size, device, **of_builder)
    keywords = {"v_head_dim": shape.v_head_dim, "kv_cache_dtype": kv_cache_dtype}
    if fp8 is not None:
        keywords["kv_scale"] = torch.tensor([0.5], device=device)
    kv_b = randn(num_heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank)
    return LatentBatch(
        q.to(device, dtype),
        randn(rows, shape.kv_lora_rank).to(device, dtype),
        randn(rows, shape.qk_rope_head_dim).to(device, dtype),
        cache.to(device),
        builder.build(0, common),
        (kv_b / shape.kv_lora_rank**0.5).to(device, dtype),
        shape,
        keywords,
    )
