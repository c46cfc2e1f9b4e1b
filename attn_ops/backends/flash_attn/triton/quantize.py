"""Queries in E4M3, for kernels that multiply FP8 by FP8: by one scale, or by one a kv head.

    quantize_query    two kernels, any batch: the largest element first, then all by one scale
    quantize_tokens   one kernel, single tokens: each request and kv head by a scale of its own

Scales are powers of two, so an element rounds as it would alone: what else is under the scale shows
in no bit of it, down to elements 2^-14 of the largest there, where E4M3 ends.

T rows, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
R rows times heads, M of a program.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2

LARGEST = tl.constexpr(448.0)
"""Of E4M3."""

SMALLEST_SCALE = tl.constexpr(2.0**-100)
"""For queries that are all zero."""

ELEMENTS = 16384
"""Of a program's tile: with 4096, programs of the second kernel would read more parts than rows."""

MAX_PARTS = 512
"""Programs that look for the largest element; the second kernel reads a number from each."""


@triton.jit
def _load_rows(
    q_ptr,
    row_M,
    num_rows,
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    """q_MH in float32, 0 outside, and the mask."""
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    mask_MH = (row_M < num_rows)[:, None] & (h_H < HEAD_SIZE)[None, :]
    token_M = (row_M // NUM_HEADS).to(tl.int64)
    offset_M = token_M * stride_token + (row_M % NUM_HEADS) * stride_head
    q_MH = tl.load(q_ptr + offset_M[:, None] + h_H[None, :], mask=mask_MH, other=0.0)
    return q_MH.to(tl.float32), mask_MH


@triton.jit
def _rounded(x):
    """x in float32, rounded as E4M3 rounds, so that converting it is exact."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 - 6)
    # 1.5 * 2^23 last places of E4M3: float32 has no bit behind them.
    shift = ((exponent + 20) << 23).to(tl.float32, bitcast=True) * 1.5
    return (x + shift) - shift


@triton.jit
def _finite_size(q_MH):
    """|q|, 0 where it is not finite: what padding requests hold may be NaN."""
    size_MH = tl.abs(q_MH)
    return tl.where(size_MH < float("inf"), size_MH, 0.0)


@triton.jit
def _scale_for(largest):
    """The least power of two by which `largest` fits into E4M3."""
    at_least = tl.maximum(largest / LARGEST, SMALLEST_SCALE)
    # Up to a power of two: a mantissa that is not 0 carries into the exponent.
    bits = at_least.to(tl.int32, bitcast=True) + 0x7FFFFF
    return ((bits >> 23) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_rows(
    out_ptr,
    row_M,
    q_MH,
    mask_MH,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    ROUND: tl.constexpr,  # the interpreter's conversion loses a mantissa's carry
):
    if ROUND:
        q_MH = _rounded(q_MH)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    out_ptr_MH = out_ptr + (row_M.to(tl.int64) * HEAD_SIZE)[:, None] + h_H[None, :]
    tl.store(out_ptr_MH, q_MH.to(out_ptr.dtype.element_ty), mask=mask_MH)


@triton.jit
def largest_kernel(
    part_ptr,  # [programs] float32, written
    q_ptr,
    num_rows,  # R
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Largest finite |q| among the program's rows."""
    wait_for_inputs(PDL)
    largest_M = tl.zeros([BLOCK_M], tl.float32)
    first = tl.program_id(0) * BLOCK_M
    for start in range(first, num_rows, tl.num_programs(0) * BLOCK_M):
        q_MH, _ = _load_rows(
            q_ptr, start + tl.arange(0, BLOCK_M), num_rows, stride_token, stride_head,
            NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE,
        )  # fmt: skip
        largest_M = tl.maximum(largest_M, tl.max(_finite_size(q_MH), 1))
    tl.store(part_ptr + tl.program_id(0), tl.max(largest_M, 0))


@triton.jit
def quantize_kernel(
    out_ptr,  # [R, H] E4M3, written
    scale_ptr,  # [1] float32, written
    part_ptr,  # of `largest_kernel`
    num_parts,
    q_ptr,
    num_rows,  # R
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
    ROUND: tl.constexpr,  # of `_store_rows`
    PDL: tl.constexpr,  # launched early
):
    wait_for_inputs(PDL)
    part_P = tl.arange(0, PARTS)
    scale = _scale_for(tl.max(tl.load(part_ptr + part_P, mask=part_P < num_parts, other=0.0), 0))
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_MH, mask_MH = _load_rows(
        q_ptr, row_M, num_rows, stride_token, stride_head, NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE
    )
    q_MH *= 1.0 / scale
    _store_rows(out_ptr, row_M, q_MH, mask_MH, HEAD_SIZE, PADDED_HEAD_SIZE, ROUND)


@triton.jit
def quantize_tokens_kernel(
    out_ptr,  # [R, H] E4M3, written
    scale_ptr,  # [S, K] float32, written
    q_ptr,
    start_ptr,  # [S + 1] int32: a request's first row, and the next one's
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # G
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # G padded to a power of two
    ROUND: tl.constexpr,  # of `_store_rows`
    PDL: tl.constexpr,  # launched early
):
    """A program a request and kv head: the G rows of its query heads, none without a token."""
    wait_for_inputs(PDL)
    request, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(start_ptr + request)
    num_tokens = tl.load(start_ptr + request + 1) - token  # 0 or 1
    first = token * NUM_HEADS + head * GROUP
    row_M = first + tl.arange(0, BLOCK_M)
    q_MH, mask_MH = _load_rows(  # pyright: ignore[reportGeneralTypeIssues]
        q_ptr, row_M, first + GROUP * num_tokens, stride_token, stride_head,
        NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE,
    )  # fmt: skip
    scale = _scale_for(tl.max(tl.max(_finite_size(q_MH), 1), 0))
    tl.store(scale_ptr + request * (NUM_HEADS // GROUP) + head, scale)
    q_MH *= 1.0 / scale
    _store_rows(out_ptr, row_M, q_MH, mask_MH, HEAD_SIZE, PADDED_HEAD_SIZE, ROUND)


def quantize_query(q: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, N, H] -> [T, N, H] E4M3, contiguous, and [1] float32: q is about their product.

    Args:
        q: strides are free but for contiguous heads.
        num_rows: rows of it that are read and written, at least 1; those behind are undefined.
    """
    _, num_heads, head_size = q.shape
    out_TNH = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    num_rows *= num_heads
    width = next_power_of_2(head_size)
    rows = max(ELEMENTS // width, 1)
    num_tiles = cdiv(num_rows, rows)
    num_parts = min(num_tiles, MAX_PARTS)
    memory = torch.empty(MAX_PARTS + 1, dtype=torch.float32, device=q.device)
    part, scale = memory[:MAX_PARTS], memory[MAX_PARTS:]
    arguments = (q, num_rows, q.stride(0), q.stride(1))
    constants: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD_SIZE": width,
        "BLOCK_M": rows,
        "num_warps": 8,
        **early_launch(q.device),
    }
    with torch.cuda.device_of(q):  # Triton launches on the current device
        largest_kernel[(num_parts,)](part, *arguments, **constants)
        constants |= {"PARTS": MAX_PARTS, "ROUND": knobs.runtime.interpret}
        quantize_kernel[(num_tiles,)](out_TNH, scale, part, num_parts, *arguments, **constants)
    return out_TNH, scale


def quantize_tokens(
    q: torch.Tensor, query_start_loc: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, N, H] -> [T, N, H] E4M3, contiguous, and [S, K] float32: q is about their product.

    Args:
        q: strides are free but for contiguous heads.
        query_start_loc: [S + 1] int32, device; no request has more than one row. Rows that are no
            request's are neither read nor written.
        num_kv_heads: K; query heads G * k to G * k + G - 1 share the scale of kv head k.
    """
    _, num_heads, head_size = q.shape
    num_reqs, group = query_start_loc.shape[0] - 1, num_heads // num_kv_heads
    out_TNH = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    scale_SK = torch.empty(num_reqs, num_kv_heads, dtype=torch.float32, device=q.device)
    block_m, width = next_power_of_2(group), next_power_of_2(head_size)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        quick(quantize_tokens_kernel, (num_reqs, num_kv_heads))(
            out_TNH, scale_SK, q, query_start_loc, q.stride(0), q.stride(1),
            NUM_HEADS=num_heads, GROUP=group, HEAD_SIZE=head_size, PADDED_HEAD_SIZE=width,
            BLOCK_M=block_m, ROUND=knobs.runtime.interpret,
            # A warp reduces 4 x 128 without shared memory.
            num_warps=1 if block_m * width <= 1024 else 4,  # pyright: ignore[reportCallIssue]
            **early_launch(q.device),
        )  # fmt: skip
    return out_TNH, scale_SK
