"""What stands between products of many rows: an addition with an RMSNorm, and a gate's SiLU.

T rows, K columns, F columns of a gate.
"""

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2
from attn_ops.ops.products.ordered_mm import new_rows
from attn_ops.ops.triton.fused_products import sum_of

BLOCK_F = 1024
"""Gated columns of a program."""


@triton.jit
def rms_norm_kernel(
    out_ptr,  # [T, K] contiguous
    sum_ptr,  # [T, K] contiguous, if HAS_ADDEND
    x_ptr,  # [T, K], rows of stride_x
    addend_ptr,  # [T, K], rows of stride_addend, if HAS_ADDEND
    weight_ptr,  # [K]
    stride_x,
    stride_addend,
    eps,
    offset,  # added to the weight
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (T,)."""
    k_K = tl.arange(0, BLOCK_K)
    inside_K = k_K < K
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_K = tl.load(x_ptr + row * stride_x + k_K, mask=inside_K, other=0.0)
    if HAS_ADDEND:
        addend_K = tl.load(addend_ptr + row * stride_addend + k_K, mask=inside_K, other=0.0)
        x_K = sum_of(x_K, addend_K)
        tl.store(sum_ptr + row * K + k_K, x_K, mask=inside_K)
    wide_K = x_K.to(tl.float32)
    weight_K = tl.load(weight_ptr + k_K, mask=inside_K, other=0.0).to(tl.float32)
    weight_K += offset
    y_K = wide_K * tl.rsqrt(tl.sum(wide_K * wide_K, 0) / K + eps) * weight_K
    tl.store(out_ptr + row * K + k_K, y_K.to(out_ptr.dtype.element_ty), mask=inside_K)


@triton.jit
def silu_mul_kernel(
    out_ptr,  # [T, F] contiguous
    x_ptr,  # [T, 2 * F] contiguous: the gate's columns before those of up
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (T, ceil(F / BLOCK))."""
    f_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_F = f_F < F
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    gate_F = tl.load(x_ptr + row * 2 * F + f_F, mask=inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(x_ptr + row * 2 * F + F + f_F, mask=inside_F, other=0.0).to(tl.float32)
    y_F = gate_F / (1.0 + tl.exp(-gate_F)) * up_F
    tl.store(out_ptr + row * F + f_F, y_F.to(out_ptr.dtype.element_ty), mask=inside_F)


def launch_rms_norm(
    x: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + addend [T, K], and its norm, contiguous; T is at least 1. Columns are contiguous."""
    num_rows, k = x.shape
    out = new_rows(num_rows, k, x)
    total = x if addend is None else x.new_empty(num_rows, k)
    added = x if addend is None else addend
    block = next_power_of_2(k)
    with torch.cuda.device_of(x):
        quick(rms_norm_kernel, (num_rows,))(
            out, total, x, added, weight.contiguous(), x.stride(0), added.stride(0), eps, offset,
            K=k, BLOCK_K=block,
            HAS_ADDEND=addend is not None, num_warps=min(max(block // 512, 1), 16),
            **early_launch(x.device),
        )  # fmt: skip
    return total, out


def launch_silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * F] contiguous -> [T, F] contiguous; T is at least 1."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = new_rows(num_rows, width, x)
    with torch.cuda.device_of(x):
        quick(silu_mul_kernel, (num_rows, cdiv(width, BLOCK_F)))(
            out, x, F=width, BLOCK=BLOCK_F, **early_launch(x.device)
        )
    return out
