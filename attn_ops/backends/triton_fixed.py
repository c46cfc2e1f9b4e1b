"""TRITON_FIXED: paged attention that gives a row the same bits in every batch.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| cuda, cpu | fp16, bf16, fp32 | 8-256 by 8, 512 | 16-256 by 16 | yes | yes | always |

| FP8 cache | ALiBi | sinks | non-causal | log-sum-exp |
|---|---|---|---|---|
| e4m3 (from compute capability 8.9), e5m2 | no | yes | no | no |

What sessions with `batch_invariant=True` use. A query row's result depends on its own query, keys
and values alone, and not on the other rows, on how many rows of its request are in the step, or on
the length of the batch's longest sequence: docs/batch_invariance.md. A prefix that several
requests share is not attended to apart, as that would merge keys in another order.

On a cpu the kernels run interpreted, for tests, and only with TRITON_INTERPRET=1. This file imports
no Triton: the first forward imports the kernels.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses

import torch

from attn_ops.backends.base import AttentionOptions, Backend
from attn_ops.backends.triton import BACKEND as TRITON
from attn_ops.backends.triton import check
from attn_ops.metadata import AttentionMetadata


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H]; strides free but for contiguous heads.

    Raises:
        ValueError: the backend does not support the tensors, the window or the cap.
    """
    check(q, kv_cache, options)
    if q.shape[0] == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    from attn_ops.backends.triton.fixed import fixed_attention

    with torch.cuda.device_of(q):  # Triton launches on the current device
        return fixed_attention(q, kv_cache, meta.common, options)


BACKEND = Backend(
    name="TRITON_FIXED",
    support=dataclasses.replace(
        TRITON.support, alibi=False, non_causal=False, lse=False, output_quant=()
    ),
    builder=TRITON.builder,
    forward=forward,
    unavailable=TRITON.unavailable,
)
