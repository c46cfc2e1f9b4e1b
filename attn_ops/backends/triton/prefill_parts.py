"""Around the prefill kernel: keys gathered from their blocks before it, parts combined after it.

T rows, S requests, N query heads, K kv heads, H head size, P blocks, B block size, R ranges of
keys, L rows of a request in the gathered keys.
"""

import torch
import triton
import triton.language as tl

from attn_ops.backends.triton.tiles import LN_2, padded_head_size
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2
from attn_ops.metadata import CommonAttentionMetadata

GATHER_ROWS = 128
"""Rows of a program, and the unit to which a request's keys are filled up with zeros: every tile
of the kernel that reads them divides it."""


@triton.jit(
    do_not_specialize=["stride_table", "num_rows"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "table_ptr"],
)
def gather_kernel(
    out_ptr,  # [2, K, S * L, HEAD_SIZE] contiguous
    kv_ptr,  # [P, 2, B, K, HEAD_SIZE]
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, max blocks] int32
    stride_block,
    stride_kv,
    stride_token,
    stride_kv_head,
    stride_table,
    num_rows,  # L
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (L // ROWS, S, 2 * K)."""
    wait_for_inputs(PDL)
    first = tl.program_id(0) * ROWS
    request = tl.program_id(1).to(tl.int64)
    kv = tl.program_id(2).to(tl.int64) // NUM_KV_HEADS
    kv_head = tl.program_id(2).to(tl.int64) % NUM_KV_HEADS
    seq_len = tl.load(seq_lens_ptr + request)
    if first >= seq_len:
        return
    key_R = first + tl.arange(0, ROWS)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    stored_H = h_H < HEAD_SIZE
    valid_R = key_R < seq_len
    table_ptr += request * stride_table
    block_R = tl.load(table_ptr + key_R // BLOCK_SIZE, mask=valid_R, other=0).to(tl.int64)
    kv_ptr += kv * stride_kv + kv_head * stride_kv_head
    offset_R = block_R * stride_block + (key_R % BLOCK_SIZE) * stride_token
    kv_RH = tl.load(
        kv_ptr + offset_R[:, None] + h_H[None, :],
        mask=valid_R[:, None] & stored_H[None, :],
        other=0.0,
    )
    first_row = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + request) * num_rows
    row_R = first_row + key_R
    out_ptr_RH = out_ptr + row_R[:, None] * HEAD_SIZE + h_H[None, :]
    tl.store(out_ptr_RH, kv_RH.to(out_ptr.dtype.element_ty), mask=stored_H[None, :])


def rows_per_request(common: CommonAttentionMetadata) -> int:
    """L: max_seq_len, which must bound every seq_len, as a multiple of GATHER_ROWS."""
    return cdiv(max(common.max_seq_len, 1), GATHER_ROWS) * GATHER_ROWS


def gather_keys(
    kv_cache: torch.Tensor, common: CommonAttentionMetadata, dtype: torch.dtype
) -> torch.Tensor:
    """kv_cache [P, 2, B, K, H] -> keys and values by head, [2, K, S * L, H] in `dtype`.

    Request s owns rows s * L to (s + 1) * L of each head. Behind its keys come zeros up to a
    multiple of GATHER_ROWS; further rows are not written. Keys from L on are left out.
    """
    _, _, block_size, num_kv_heads, head_size = kv_cache.shape
    num_rows = rows_per_request(common)
    shape = (2, num_kv_heads, common.num_reqs * num_rows, head_size)
    out = torch.empty(shape, dtype=dtype, device=kv_cache.device)
    quick(gather_kernel, (num_rows // GATHER_ROWS, common.num_reqs, 2 * num_kv_heads))(
        out,
        kv_cache,
        common.seq_lens,
        common.block_table_tensor,
        *kv_cache.stride()[:4],
        common.block_table_tensor.stride(0),
        num_rows,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=padded_head_size(head_size),
        BLOCK_SIZE=block_size,
        ROWS=GATHER_ROWS,
        num_warps=8,
        **early_launch(out.device),
    )
    return out


@triton.jit
def store_rows(
    out_ptr,  # as of `prefill_kernel`
    part_lse_ptr,
    lse_ptr,
    acc_MH,
    max_M,
    sum_M,
    row_M,
    head_M,
    owned_M,
    split,
    num_splits,
    v_scale_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """What a program has computed of its rows, or a part of it, goes to memory."""
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]
    total_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    out_MH = acc_MH / total_M[:, None]
    if HAS_V_SCALE:
        out_MH *= tl.load(v_scale_ptr)
    out_row_M = row_M * NUM_HEADS + head_M
    if SPLIT:
        out_row_M = out_row_M * num_splits + split
        tl.store(part_lse_ptr + out_row_M, max_M + tl.log2(total_M), mask=owned_M)
    elif HAS_LSE:
        tl.store(lse_ptr + out_row_M, (max_M + tl.log2(total_M)) * LN_2, mask=owned_M)
    out_ptr_MH = out_ptr + (out_row_M * HEAD_SIZE)[:, None] + h_H[None, :]
    tl.store(out_ptr_MH, out_MH.to(out_ptr.dtype.element_ty), mask=mask_MH)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["lse_ptr"])
def combine_rows_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous
    part_ptr,  # [T, N, R, HEAD_SIZE] float32 contiguous
    part_lse_ptr,  # [T, N, R] float32 contiguous, base 2
    num_splits,  # R
    lse_ptr,  # [T, N] float32 contiguous, natural log, if HAS_LSE
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (T * N,): weights the parts of one row and head by their log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    r_R = tl.arange(0, PADDED_SPLITS)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    part = row * num_splits
    wait_for_inputs(PDL)
    lse_R = tl.load(part_lse_ptr + part + r_R, mask=r_R < num_splits, other=float("-inf"))
    some_R = lse_R != float("-inf")
    top = tl.max(lse_R, 0)
    weight_R = tl.where(some_R, tl.exp2(lse_R - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    part_RH = tl.load(
        part_ptr + ((part + r_R) * HEAD_SIZE)[:, None] + h_H[None, :],
        mask=some_R[:, None] & (h_H < HEAD_SIZE)[None, :],
        other=0.0,
    )
    total = tl.sum(weight_R, 0)
    total = tl.where(total == 0.0, 1.0, total)
    out_H = tl.sum(part_RH * weight_R[:, None], 0) / total
    out_ptr_H = out_ptr + row * HEAD_SIZE + h_H
    tl.store(out_ptr_H, out_H.to(out_ptr.dtype.element_ty), mask=h_H < HEAD_SIZE)
    if HAS_LSE:  # of a row without keys top is -inf already
        tl.store(lse_ptr + row, (top + tl.log2(total)) * LN_2)


def empty_row_parts(
    out: torch.Tensor, of: torch.Size, num_splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """part [T, N, R, H] and part_lse [T, N, R], float32; stand-ins if there is but one range."""
    if num_splits == 1:
        return out, out
    num_rows, num_heads, head_size = of
    shape = (num_rows, num_heads, num_splits)
    part = torch.empty(*shape, head_size, dtype=torch.float32, device=out.device)
    return part, torch.empty(shape, dtype=torch.float32, device=out.device)


def combine_rows(
    out: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """part [T, N, R, H] and part_lse [T, N, R] into out [T, N, H] and lse [T, N]."""
    num_rows, num_heads, num_splits, head_size = part.shape
    quick(combine_rows_kernel, (num_rows * num_heads,))(
        out,
        part,
        part_lse,
        num_splits,
        out if lse is None else lse,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=padded_head_size(head_size),
        PADDED_SPLITS=next_power_of_2(num_splits),
        HAS_LSE=lse is not None,
        num_warps=4,
        **early_launch(out.device),
    )
