"""Latents of the paged cache, one request after the other, in the model's dtype.

S requests, P blocks, B block size, W = Lkv + R columns, R rows of a program.
"""

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2

ROWS = 32
"""Of a program."""

COLUMNS = 64
"""Copied at a time: DeepSeek's 576 are nine times as many."""


@triton.jit(
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "num_steps"],
    do_not_specialize_on_alignment=["table_ptr", "cu_seq_lens_ptr", "seq_starts_ptr"],
)
def gather_kernel(
    out_ptr,  # [any, WIDTH]
    kv_ptr,  # [P, B, WIDTH], any dtype
    table_ptr,  # [S, max blocks] int32
    cu_seq_lens_ptr,  # [S + 1] int32
    seq_starts_ptr,  # [S] int32
    scale_ptr,  # [1] float32, if HAS_SCALE
    stride_out,
    stride_block,
    stride_token,
    stride_table,
    num_reqs,
    num_rows,
    num_steps,  # 2 ** num_steps > S
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (ceil(rows / ROWS),)."""
    wait_for_inputs(PDL)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owned_R = row_R < tl.minimum(tl.load(cu_seq_lens_ptr + num_reqs), num_rows)
    # The last request that begins at or before the row: bisection, all rows at once.
    request_R = tl.zeros([ROWS], tl.int32)
    high_R = tl.zeros([ROWS], tl.int32) + tl.maximum(num_reqs - 1, 0)
    for _ in range(num_steps):
        middle_R = (request_R + high_R + 1) // 2
        begins_R = tl.load(cu_seq_lens_ptr + middle_R) <= row_R
        request_R = tl.where(begins_R, middle_R, request_R)
        high_R = tl.where(begins_R, high_R, tl.maximum(middle_R - 1, request_R))
    begin_R = tl.load(cu_seq_lens_ptr + request_R)
    token_R = row_R - begin_R + tl.load(seq_starts_ptr + request_R, mask=owned_R, other=0)
    entry_R = request_R.to(tl.int64) * stride_table + token_R // BLOCK_SIZE
    block_R = tl.load(table_ptr + entry_R, mask=owned_R, other=0).to(tl.int64)
    from_R = block_R * stride_block + (token_R % BLOCK_SIZE) * stride_token
    to_R = row_R.to(tl.int64) * stride_out
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr)
    c_C = tl.arange(0, COLUMNS)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        mask_RC = owned_R[:, None] & (first + c_C < WIDTH)[None, :]
        x_RC = tl.load(kv_ptr + from_R[:, None] + (first + c_C)[None, :], mask=mask_RC, other=0.0)
        if HAS_SCALE:
            x_RC = x_RC.to(tl.float32) * scale
        place_RC = out_ptr + to_R[:, None] + (first + c_C)[None, :]
        tl.store(place_RC, x_RC.to(out_ptr.dtype.element_ty), mask=mask_RC)


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
    """A part of each request's latents into consecutive rows of `out`.

    Args:
        kv_cache: [P, B, Lkv + R], or uint8 with `fp8`.
        block_table: [S, max blocks] int32.
        cu_seq_lens: [S + 1] int32: row of `out` where each request begins, and where all end; rows
            behind that stay.
        seq_starts: [S] int32: position of each request's first token, anywhere in a page.
        out: [any, Lkv + R], written.
        kv_scale: [1] float32: an FP8 cache means stored * kv_scale; None is 1.
        fp8: dtype of an FP8 cache.
    """
    num_rows, width = out.shape
    num_reqs = seq_starts.shape[0]
    if num_rows == 0 or num_reqs == 0:
        return
    scaled = fp8 is not None and kv_scale is not None
    quick(gather_kernel, (cdiv(num_rows, ROWS),))(
        out,
        kv_cache if fp8 is None else kv_cache.view(fp8),
        block_table,
        cu_seq_lens,
        seq_starts,
        kv_scale if scaled else out,
        out.stride(0),
        *kv_cache.stride()[:2],
        block_table.stride(0),
        num_reqs,
        num_rows,
        num_reqs.bit_length(),
        WIDTH=width,
        BLOCK_SIZE=kv_cache.shape[1],
        ROWS=ROWS,
        COLUMNS=min(COLUMNS, next_power_of_2(width)),
        HAS_SCALE=scaled,
        num_warps=4,
        **early_launch(out.device),
    )
