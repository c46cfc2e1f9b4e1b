"""A batch over a poisoned cache, for backends and kernels called by hand, and its oracle.

T rows, N query heads, K kv heads, H head size, P blocks, B block size.
"""

from collections.abc import Sequence
from typing import Any

import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.metadata import kv_dtype_of

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

Paged = tuple[torch.Tensor, torch.Tensor, CommonAttentionMetadata]
"""q [T, N, H], kv_cache [P, 2, B, K, H] and the batch."""


def make_paged(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    spec: AttentionSpec,
    block_size: int = 16,
    *,
    num_padding_rows: int = 3,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Paged:
    """Blocks are shuffled; what no token fills is NaN, in FP8 the byte 0x7f; so is padding of q.

    The interpreter converts 0x7f to 480 or 114688. A seq_len of 0 with query rows is a padding
    request of a captured batch.
    """
    generator = torch.Generator().manual_seed(seed)
    width = max([1, *(-(-n // block_size) for n in seq_lens)]) + 1
    num_blocks = len(seq_lens) * width + 1
    order = torch.randperm(num_blocks - 1, generator=generator).int() + 1
    table_SM = order.view(len(seq_lens), width)
    shape = (num_blocks, 2, block_size, spec.num_kv_heads, spec.head_size)
    fp8, kv = kv_dtype_of(spec.kv_cache_dtype), torch.randn(shape, generator=generator)
    kv = kv.to(spec.dtype) if fp8 is None else kv.to(fp8).view(torch.uint8)
    empty_PB = torch.ones(num_blocks, block_size, dtype=torch.bool)
    for blocks, length in zip(table_SM.tolist(), seq_lens, strict=True):
        for first in range(0, length, block_size):
            empty_PB[blocks[first // block_size], : length - first] = False
    kv.masked_fill_(empty_PB[:, None, :, None, None], float("nan") if fp8 is None else 0x7F)
    num_rows = sum(query_lens) + num_padding_rows
    q = torch.randn(num_rows, spec.num_heads, spec.head_size, generator=generator).to(spec.dtype)
    q[sum(query_lens) :] = float("nan")
    cached = [max(pair) for pair in zip(query_lens, seq_lens, strict=True)]
    common = CommonAttentionMetadata.from_lengths(
        query_lens, cached, table_SM, block_size, device, num_padded_tokens=num_rows
    )
    seq_cpu = torch.tensor(seq_lens, dtype=torch.int32)
    common = common.replace(
        seq_lens=seq_cpu.to(device, copy=True), seq_lens_cpu=seq_cpu, causal=spec.causal
    )
    return q.to(device), kv.to(device), common


def heads_first(kv_cache: torch.Tensor) -> torch.Tensor:
    """The cache in HND order: of the same shape, with other strides."""
    return kv_cache.transpose(2, 3).contiguous().transpose(2, 3)


def assert_right(
    out_TNH: torch.Tensor, lse_TN: torch.Tensor | None, paged: Paged, scale: float, **options: Any
) -> None:
    """Within TOLERANCE of the float64 oracle in relative error norm; rows without keys are zero."""
    q, kv_cache, common = paged
    wanted_lse_TN = torch.full(q.shape[:2], float("nan"), dtype=torch.float64, device=q.device)
    wanted_TNH = reference_attention(
        q, kv_cache, common, scale, compute_dtype=torch.float64, lse=wanted_lse_TN, **options
    )
    tolerance, error_TNH = TOLERANCE[q.dtype], out_TNH.double() - wanted_TNH
    error = error_TNH.norm() / wanted_TNH.norm()
    assert error <= tolerance, f"relative error {error:.2e}"
    empty_T = (wanted_lse_TN == float("-inf")).all(1)
    num_empty = q.shape[0] - sum(common.query_lens[common.seq_lens > 0].tolist())
    assert empty_T.sum() == num_empty
    assert (out_TNH[empty_T] == 0).all()
    error_T = error_TNH.norm(dim=(1, 2)) / wanted_TNH.norm(dim=(1, 2))
    assert (error_T[~empty_T] <= 4 * tolerance).all(), f"relative errors {error_T}"
    assert out_TNH.is_contiguous()
    assert out_TNH.dtype == q.dtype
    if lse_TN is not None:
        torch.testing.assert_close(lse_TN.double(), wanted_lse_TN, atol=tolerance, rtol=tolerance)
