"""Batches over poisoned caches.

T tokens, S requests, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
from collections.abc import Sequence

import torch

from attn_ops import AttentionMetadata, AttentionSpec, Backend, CommonAttentionMetadata, get_backend


@dataclasses.dataclass
class Batch:
    """A step's metadata and tensors: q [T, N, H], k, v [T, K, H], kv_cache [P, 2, B, K, H]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_cache: torch.Tensor
    meta: AttentionMetadata

    @property
    def common(self) -> CommonAttentionMetadata:
        return self.meta.common


def build_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    num_padding_rows: int = 0,
    causal: bool = True,
    written: bool = True,
    backend: Backend | None = None,
    seed: int = 0,
    num_blocks: int | None = None,
) -> Batch:
    """A batch over a cache of shuffled blocks.

    The cache is NaN wherever no token stands, the null block included. Padding rows of q are NaN.
    `written`: whether this step's own keys and values are in the cache.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    width = max([1, *(-(-n // block_size) for n in seq_lens)])
    num_blocks = num_blocks or len(seq_lens) * width + 2
    owned = torch.randperm(num_blocks - 1, generator=generator)[: len(seq_lens) * width] + 1
    table_SM = owned.int().view(len(seq_lens), width)
    kv_cache = torch.full(
        (num_blocks, 2, block_size, num_kv_heads, head_size), float("nan"), dtype=dtype
    )
    for blocks, query, tokens in zip(table_SM, query_lens, seq_lens, strict=True):
        for position in range(tokens if written else tokens - query):
            block, offset = blocks[position // block_size], position % block_size
            kv_cache[block, :, offset] = randn(2, num_kv_heads, head_size)
    rows = sum(query_lens) + num_padding_rows
    common = CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table_SM, block_size, num_padded_tokens=rows
    )
    common = dataclasses.replace(common, causal=causal)
    q = randn(rows, num_heads, head_size)
    q[sum(query_lens) :] = float("nan")
    backend = backend or get_backend("TORCH")
    spec = AttentionSpec(num_heads, num_kv_heads, head_size, dtype)
    meta = backend.builder(backend, [spec], block_size, "cpu").build(0, common)
    return Batch(
        q,
        randn(rows, num_kv_heads, head_size),
        randn(rows, num_kv_heads, head_size),
        kv_cache,
        meta,
    )


def random_batch(
    query_lens: Sequence[int] = (3, 1),
    seq_lens: Sequence[int] = (40, 20),
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, CommonAttentionMetadata]:
    """q [T, 4, 32], a full cache [P, 2, 16, 2, 32] and the batch."""
    width, num_reqs = 3, len(seq_lens)
    table_SM = torch.arange(1, 1 + width * num_reqs, dtype=torch.int32).view(num_reqs, width)
    common = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table_SM, 16)
    kv_cache = torch.randn(1 + width * num_reqs, 2, 16, 2, 32).to(dtype)
    return torch.randn(sum(query_lens), 4, 32).to(dtype), kv_cache, common


RANDOM_SPEC = AttentionSpec(4, 2, 32, torch.float32)
"""Of `random_batch`."""


def build_metadata(
    backend: str | Backend,
    common: CommonAttentionMetadata,
    specs: AttentionSpec | Sequence[AttentionSpec] = RANDOM_SPEC,
    block_size: int = 16,
    common_prefix_len: int = 0,
) -> AttentionMetadata:
    if isinstance(backend, str):
        backend = get_backend(backend)
    specs = [specs] if isinstance(specs, AttentionSpec) else specs
    device = str(common.query_start_loc.device.type)
    return backend.builder(backend, specs, block_size, device).build(common_prefix_len, common)
