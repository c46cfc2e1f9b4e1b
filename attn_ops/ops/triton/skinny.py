"""A product of few rows: each program reads its rows of the weight once.

T rows of x, in blocks of BLOCK_T; K inputs, M outputs. The weight's tile is the left factor, so
that its many rows fill the tensor cores, and x, padded to BLOCK_T rows, the right one; where x has
rows enough, the other way round. Every form sums K in order, in one accumulator: a row's bits do
not depend on the constants of a launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv
from attn_ops.ops.products.skinny_constants import SkinnyConstants, block_of_rows, skinny_constants

PRECISE_TERMS = 128
"""Products of FP8 that Hopper sums in 14 bits before float32 does, as cuBLAS has it."""


@triton.jit
def prefetch_tile(w_ptr, m_M, stride_w, begin, K: tl.constexpr):
    """Ask for columns `begin` on of the weight's rows, 128 bytes a thread."""
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    k_K = begin + tl.arange(0, K // LINE) * LINE
    place_MK = (w_ptr + m_M.to(tl.int64)[:, None] * stride_w + k_K[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place_MK],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    out_ptr,  # [T, M] contiguous
    x_ptr,  # [T, K], rows of stride_x
    w_ptr,  # [M, K], rows of stride_w
    bias_ptr,  # [M], if HAS_BIAS
    x_scale_ptr,  # [T] or [1] float32, if SCALED
    w_scale_ptr,  # [M] or [1] float32, if SCALED
    num_rows,  # T
    stride_x,
    stride_w,
    M,
    K: tl.constexpr,
    PRECISE: tl.constexpr,  # terms of FP8 that are summed in 14 bits; None: any
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    X_SCALE_BY_ROW: tl.constexpr,
    W_SCALE_BY_ROW: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """Grid (ceil(T / BLOCK_T), ceil(M / BLOCK_M)): a tile of the weight is read at one time."""
    m_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    t_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k_K = tl.arange(0, BLOCK_K)
    inside_M, inside_T = m_M < M, t_T < num_rows
    row_M = tl.where(inside_M, m_M, 0)
    for tile in tl.static_range(PREFETCH):  # nobody writes the weight in this step
        prefetch_tile(w_ptr, row_M, stride_w, tile * BLOCK_K, BLOCK_K)
    wait_for_inputs(PDL)
    w_ptr_MK = w_ptr + row_M.to(tl.int64)[:, None] * stride_w + k_K[None, :]
    x_ptr_TK = x_ptr + t_T[:, None] * stride_x + k_K[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_M] if ROWS_FIRST else [BLOCK_M, BLOCK_T], tl.float32)
    for begin in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            w_MK = tl.load(w_ptr_MK + begin)
            x_TK = tl.load(x_ptr_TK + begin, mask=inside_T[:, None], other=0.0)
        else:
            inside_K = begin + k_K < K
            w_MK = tl.load(w_ptr_MK + begin, mask=inside_K[None, :], other=0.0)
            x_mask_TK = inside_T[:, None] & inside_K[None, :]
            x_TK = tl.load(x_ptr_TK + begin, mask=x_mask_TK, other=0.0)
        if SCALED:
            acc = tl.dot(w_MK, x_TK.T, acc, max_num_imprecise_acc=PRECISE)
        elif ROWS_FIRST:
            acc = tl.dot(x_TK, w_MK.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(w_MK, x_TK.T, acc, input_precision="ieee")
    acc_MT = acc.T if ROWS_FIRST else acc
    if SCALED:
        if X_SCALE_BY_ROW:
            x_scale_T = tl.load(x_scale_ptr + t_T, mask=inside_T, other=0.0)
        else:
            x_scale_T = tl.load(x_scale_ptr) + tl.zeros([BLOCK_T], tl.float32)
        if W_SCALE_BY_ROW:
            w_scale_M = tl.load(w_scale_ptr + row_M)
        else:
            w_scale_M = tl.load(w_scale_ptr) + tl.zeros([BLOCK_M], tl.float32)
        acc_MT = acc_MT * x_scale_T[None, :] * w_scale_M[:, None]
    if HAS_BIAS:
        acc_MT += tl.load(bias_ptr + row_M).to(tl.float32)[:, None]
    out_ptr_MT = out_ptr + t_T[None, :] * M + m_M[:, None]
    tl.store(
        out_ptr_MT, acc_MT.to(out_ptr.dtype.element_ty), mask=inside_M[:, None] & inside_T[None, :]
    )


def launch_skinny(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    constants: SkinnyConstants | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """x [T, K] times w [K, M], whose columns are contiguous -> [T, M]."""
    (num_rows, k), m = x.shape, w.shape[1]
    chosen = constants or skinny_constants(m, w.itemsize == 1, num_rows)
    out = torch.empty(num_rows, m, dtype=out_dtype, device=x.device)
    early = early_launch(x.device)
    arguments: dict[str, Any] = {
        "K": k,
        "PRECISE": None if fast_accum else min(PRECISE_TERMS, chosen.block_k),
        "BLOCK_T": block_of_rows(num_rows),
        "BLOCK_M": chosen.block_m,
        "BLOCK_K": chosen.block_k,
        "HAS_BIAS": bias is not None,
        "SCALED": x_scale is not None,
        "ROWS_FIRST": chosen.rows_first,
        "X_SCALE_BY_ROW": x_scale is not None and x_scale.numel() == num_rows and num_rows > 1,
        "W_SCALE_BY_ROW": w_scale is not None and w_scale.numel() > 1,
        "PREFETCH": chosen.prefetch if early["PDL"] else 0,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        **early,
    }
    grid = (cdiv(num_rows, arguments["BLOCK_T"]), cdiv(m, chosen.block_m))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        quick(skinny_kernel, grid)(
            out, x, w,
            out if bias is None else bias.contiguous(),
            out if x_scale is None else x_scale,
            out if w_scale is None else w_scale,
            num_rows, x.stride(0), w.stride(1), m, **arguments,
        )  # fmt: skip
    return out
