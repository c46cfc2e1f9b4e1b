"""Products of few rows with what stands before and behind them, in one kernel.

    y = (x + addend) * rsqrt(mean square + eps) * (norm_weight + offset)   before: rows of K
    out = y @ w.T, or SiLU(y @ gate.T) * (y @ up.T)                  the product
    out + residual + addend                                          behind

The factor of a row's norm is known when all of K has been read, and a product is linear: so the
kernel sums squares beside the product, and multiplies at the end. No program reads x twice.

T rows, at most 16 with a norm and else 64; K inputs, M outputs, F = M // 2 of a gated product.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv
from attn_ops.ops.products.skinny_constants import SkinnyConstants, block_of_rows, skinny_constants
from attn_ops.ops.triton.skinny import prefetch_tile

ROWS = 16
"""Of a launch with a norm at most: squares of a row are summed in one order."""


@triton.jit
def sum_of(first, second):
    """As two kernels have it that hold the sum in the dtype of both."""
    return (first.to(tl.float32) + second.to(tl.float32)).to(first.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def fused_kernel(
    out_ptr,  # [T, M] contiguous; [T, F] if GATED
    x_ptr,  # [T, K], rows of stride_x
    addend_ptr,  # [T, K], rows of stride_addend, if HAS_ADDEND
    norm_weight_ptr,  # [K], if HAS_NORM
    w_ptr,  # [M, K], rows of stride_w; the gate's F before those of up
    bias_ptr,  # [M], if HAS_BIAS
    residual_ptr,  # [T, M], rows of stride_residual, if RESIDUALS
    more_ptr,  # the same, of stride_more: residual + more is one sum, if RESIDUALS is 2
    num_rows,  # T
    stride_x,
    stride_addend,
    stride_w,
    stride_residual,
    stride_more,
    eps,
    offset,  # added to norm_weight
    M,  # F if GATED
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of w
    BLOCK_K: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUALS: tl.constexpr,
    WIDEN: tl.constexpr,  # products of float32
    ROWS_FIRST: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (ceil(M / outputs),), with BLOCK_M outputs a program, half as many if GATED."""
    OUTPUTS: tl.constexpr = BLOCK_M // 2 if GATED else BLOCK_M
    i_M = tl.arange(0, BLOCK_M)
    m_M = tl.program_id(0) * OUTPUTS + i_M % OUTPUTS
    t_T = tl.arange(0, BLOCK_T)
    k_K = tl.arange(0, BLOCK_K)
    inside_M, inside_T = m_M < M, t_T < num_rows
    row_M = tl.where(inside_M, m_M, 0) + i_M // OUTPUTS * M
    for tile in tl.static_range(PREFETCH):  # nobody writes the weight in this step
        prefetch_tile(w_ptr, row_M, stride_w, tile * BLOCK_K, BLOCK_K)
    wait_for_inputs(PDL)
    w_ptr_MK = w_ptr + row_M.to(tl.int64)[:, None] * stride_w + k_K[None, :]
    x_ptr_TK = x_ptr + t_T[:, None] * stride_x + k_K[None, :]
    addend_ptr_TK = addend_ptr + t_T[:, None] * stride_addend + k_K[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_M] if ROWS_FIRST else [BLOCK_M, BLOCK_T], tl.float32)
    square_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for begin in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x_mask_TK = inside_T[:, None]
            w_MK = tl.load(w_ptr_MK + begin)
        else:
            inside_K = begin + k_K < K
            x_mask_TK = inside_T[:, None] & inside_K[None, :]
            w_MK = tl.load(w_ptr_MK + begin, mask=inside_K[None, :], other=0.0)
        x_TK = tl.load(x_ptr_TK + begin, mask=x_mask_TK, other=0.0)
        if HAS_ADDEND:
            x_TK = sum_of(x_TK, tl.load(addend_ptr_TK + begin, mask=x_mask_TK, other=0.0))
        if HAS_NORM:
            wide_TK = x_TK.to(tl.float32)
            square_TK += wide_TK * wide_TK
            norm_K = tl.load(norm_weight_ptr + begin + k_K, mask=begin + k_K < K, other=0.0)
            x_TK = (wide_TK * (norm_K.to(tl.float32) + offset)[None, :]).to(x_TK.dtype)
        if WIDEN:
            w_MK, x_TK = w_MK.to(tl.float32), x_TK.to(tl.float32)
        if ROWS_FIRST:
            acc = tl.dot(x_TK, w_MK.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(w_MK, x_TK.T, acc, input_precision="ieee")
    acc_MT = acc.T if ROWS_FIRST else acc
    if HAS_NORM:
        acc_MT *= tl.rsqrt(tl.sum(square_TK, 1) / K + eps)[None, :]
    if HAS_BIAS:
        acc_MT += tl.load(bias_ptr + row_M).to(tl.float32)[:, None]
    out_MT = acc_MT.to(out_ptr.dtype.element_ty)
    if GATED:
        pair_FT2 = tl.permute(tl.reshape(out_MT, [2, OUTPUTS, BLOCK_T]), [1, 2, 0])
        gate_FT, up_FT = tl.split(pair_FT2)
        gate_FT, up_FT = gate_FT.to(tl.float32), up_FT.to(tl.float32)
        out_MT = (gate_FT / (1.0 + tl.exp(-gate_FT)) * up_FT).to(out_ptr.dtype.element_ty)
    o_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask_OT = (o_O < M)[:, None] & inside_T[None, :]
    if RESIDUALS:
        residual_ptr_OT = residual_ptr + t_T[None, :] * stride_residual + o_O[:, None]
        residual_OT = tl.load(residual_ptr_OT, mask=mask_OT, other=0.0)
        if RESIDUALS == 2:
            more_ptr_OT = more_ptr + t_T[None, :] * stride_more + o_O[:, None]
            residual_OT = sum_of(residual_OT, tl.load(more_ptr_OT, mask=mask_OT, other=0.0))
        out_MT = sum_of(residual_OT, out_MT)
    tl.store(out_ptr + t_T[None, :] * M + o_O[:, None], out_MT, mask=mask_OT)


def launch_fused(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_offset: float = 0.0,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residuals: tuple[torch.Tensor, ...] = (),
    widen: bool = False,
    constants: SkinnyConstants | None = None,
) -> torch.Tensor:
    """x [T, K] and w [K, M], whose columns are contiguous -> [T, M], or [T, M // 2] if `gated`.

    Args:
        x, addend: [T, K], summed; rows with contiguous columns, as `residuals` have.
        norm_weight: [K] of an RMSNorm of the sum, with `eps`; `norm_offset` is added to it. x times
            both, not yet divided by the row's norm, must be in the range of x's dtype.
        bias: [M].
        gated: SiLU of the first half of the outputs, times the second half.
        residuals: up to two [T, outputs], summed, and added to the result.
        widen: multiply float32, as the interpreter must for bfloat16.
        constants: overrides the choice.
    """
    (num_rows, k), m = x.shape, w.shape[1]
    outputs = m // 2 if gated else m
    assert norm_weight is None or num_rows <= ROWS, "a row's squares have one order"
    chosen = constants or skinny_constants(m, fp8=False, num_rows=num_rows)
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    early = early_launch(x.device)
    residual, more = (*residuals, out, out)[:2]
    stands_for = out if addend is None else addend
    arguments: dict[str, Any] = {
        "K": k,
        "BLOCK_T": block_of_rows(num_rows),
        "BLOCK_M": chosen.block_m,
        "BLOCK_K": chosen.block_k,
        "HAS_ADDEND": addend is not None,
        "HAS_NORM": norm_weight is not None,
        "HAS_BIAS": bias is not None,
        "GATED": gated,
        "RESIDUALS": len(residuals),
        "WIDEN": widen,
        "ROWS_FIRST": chosen.rows_first,
        "PREFETCH": chosen.prefetch if early["PDL"] else 0,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        **early,
    }
    programs = cdiv(outputs, chosen.block_m // 2 if gated else chosen.block_m)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        quick(fused_kernel, (programs,))(
            out, x, stands_for,
            out if norm_weight is None else norm_weight.contiguous(),
            w,
            out if bias is None else bias.contiguous(),
            residual, more, num_rows, x.stride(0), stands_for.stride(0), w.stride(1),
            residual.stride(0), more.stride(0), eps, norm_offset, outputs, **arguments,
        )  # fmt: skip
    return out
