"""BLOCKSPARSE: attention that visits only the blocks which a layout lists, in Triton kernels.

| devices | dtypes | head sizes | block sizes | sparse block sizes | CUDA graph |
|---|---|---|---|---|---|
| cuda, cpu | as TRITON | as TRITON | as TRITON | multiples of 16 | always |

Layers without a layout run on TRITON's kernels, so that one backend takes models in which dense and
block-sparse layers alternate. Soft cap, ALiBi, sinks, FP8 caches and the log-sum-exp go with a
layout; windows and chunks do not. On a CPU the kernels run interpreted, for tests.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import functools
from collections.abc import Callable

import torch

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.backends.triton import BACKEND as TRITON
from attn_ops.backends.triton import TritonMetadataBuilder, check
from attn_ops.block_layout import (
    BlockLayout,
    BlocksparseParams,
    BlockTables,
    block_mask,
    local_strided,
)
from attn_ops.metadata import AttentionMetadata, AttentionSpec

__all__ = [
    "BACKEND",
    "BlockLayout",
    "BlockTables",
    "BlocksparseParams",
    "block_mask",
    "local_strided",
]

SIZE_UNIT = 16
"""Sparse block sizes are multiples of it: the least rows and keys of a tensor core's product."""


class BlocksparseMetadataBuilder(TritonMetadataBuilder):
    """Nothing to plan: the kernels find their work in the layout's tables and the lengths.

    A captured launch freezes num_reqs, max_seq_len and max_query_len, which must bound every
    replay's.
    """


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H]; strides free but for contiguous heads.

    Raises:
        ValueError: the backend does not support the tensors or what the layer asks for.
    """
    size, layout = options.sparse_block_size, options.block_layout
    if size is None or layout is None:
        return TRITON.forward(q, kv_cache, meta, options)
    special = not options.checked or q.is_cpu or options.kv_cache_dtype != "auto"
    if special or q.stride(2) != 1 or kv_cache.stride(4) != 1:
        check(q, kv_cache, options)
    if q.shape[0] == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend = _kernels()[meta.common.max_query_len > 1]
    if q.device.type == "cpu" or q.get_device() == torch.cuda.current_device():
        return attend(q, kv_cache, meta.common, options, size, layout)
    with torch.cuda.device_of(q):  # Triton launches on the current device, not on its arguments'
        return attend(q, kv_cache, meta.common, options, size, layout)


# Cached: two imports in a function take 5 us a call (a CPU, 2026-11-22).
@functools.cache
def _kernels() -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """The launchers of single-token queries and of any; imports Triton."""
    from attn_ops.backends.blocksparse.triton.decode import decode_attention
    from attn_ops.backends.blocksparse.triton.prefill import prefill_attention

    return decode_attention, prefill_attention


class BlocksparseSupport(Support):
    """Refuses blocks of the layout that tiles of keys do not divide."""

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = super().reasons_against(spec, block_size, device)
        if spec.blocksparse is not None and spec.blocksparse % SIZE_UNIT:
            reasons.append(
                f"sparse_block_size must be a multiple of {SIZE_UNIT}, got {spec.blocksparse}"
            )
        return reasons


BACKEND = Backend(
    name="BLOCKSPARSE",
    support=BlocksparseSupport(**{**vars(TRITON.support), "blocksparse": True, "output_quant": ()}),
    builder=BlocksparseMetadataBuilder,
    forward=forward,
    unavailable=TRITON.unavailable,
    varlen=TRITON.varlen,
)
