"""`quantize_output` on CUDA: one kernel, or two where the scale is that of the whole batch.

T tokens, N query heads, H head size, W = N * H, E values of a group.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from attn_ops.integers import cdiv, next_power_of_2
from attn_ops.output_quant.schemes import OutputQuant, QuantizedOutput
from attn_ops.output_quant.triton.epilogue import (
    TENSOR,
    as_fp8,
    epilogue_arguments,
    given_scale,
    inverse_of,
    magnitude,
    rounded,
    scale_of,
    store_quantized,
)

ROW_VALUES = 8192
"""Values that a program holds; longer rows are read twice."""

TILE = 4096
"""Values of which a program finds the largest."""


@triton.jit(do_not_specialize=["quant", "num_rows"])
def quantize_heads_kernel(
    out_ptr,  # [T, NUM_HEADS, HEAD_SIZE] contiguous, quantized
    x_ptr,  # [T, NUM_HEADS, HEAD_SIZE] contiguous
    num_rows,  # T
    quant,
    HOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (ceil(T * NUM_HEADS / BLOCK_M),): schemes whose scales need no more than a head."""
    given = given_scale(quant, HOW)
    m_M = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_M, head_M = m_M // NUM_HEADS, m_M % NUM_HEADS
    owned_M = row_M < num_rows
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]
    x_MH = tl.load(x_ptr + (m_M * HEAD_SIZE)[:, None] + h_H[None, :], mask=mask_MH, other=0.0)
    store_quantized(
        out_ptr, x_MH.to(tl.float32), row_M, head_M, owned_M, given, quant, HOW,
        NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["quant"])
def quantize_rows_kernel(
    out_ptr,  # [T, WIDTH] float8e4nv contiguous
    x_ptr,  # [T, WIDTH] contiguous
    largest_ptr,  # [1] int32: largest magnitude of all rows, if HOW says TENSOR
    quant,
    HOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T,): a scale a row, or one for all, which is known."""
    row = tl.program_id(0).to(tl.int64)
    b_B = tl.arange(0, BLOCK)
    if HOW[0] == TENSOR:
        scale = scale_of(tl.load(largest_ptr), HOW)
        tl.store(quant[0], scale, mask=row == 0)
    else:
        largest_B = tl.zeros([BLOCK], tl.int32)
        for first in tl.static_range(0, WIDTH, BLOCK):
            x_B = tl.load(x_ptr + row * WIDTH + first + b_B, mask=first + b_B < WIDTH, other=0.0)
            largest_B = tl.maximum(largest_B, magnitude(rounded(x_B.to(tl.float32), HOW)))
        scale = scale_of(tl.max(largest_B, 0), HOW)
        tl.store(quant[0] + row, scale)
    scale_1 = scale + tl.zeros([1], tl.float32)
    scale_B = tl.broadcast_to(scale_1, [BLOCK])
    inverse_B = tl.broadcast_to(inverse_of(scale_1), [BLOCK])
    for first in tl.static_range(0, WIDTH, BLOCK):
        inside_B = first + b_B < WIDTH
        x_B = tl.load(x_ptr + row * WIDTH + first + b_B, mask=inside_B, other=0.0).to(tl.float32)
        y_B = as_fp8(rounded(x_B, HOW), scale_B, inverse_B, HOW)
        tl.store(out_ptr + row * WIDTH + first + b_B, y_B, mask=inside_B)


@triton.jit(do_not_specialize=["num_values"])
def largest_kernel(
    largest_ptr,  # [1] int32, zero
    x_ptr,  # contiguous
    num_values,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (ceil(num_values / BLOCK),)."""
    i_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(x_ptr + i_B, mask=i_B < num_values, other=0.0).to(tl.float32)
    tl.atomic_max(largest_ptr, tl.max(magnitude(rounded(x_B, HOW)), 0))


def launch_quantize(x: torch.Tensor, quant: QuantizedOutput) -> torch.Tensor:
    """x [T, N, H] into `quant.out`, which is returned, and `quant.scales`; not empty.

    Launched early, before the kernel that writes x has ended, it was 0.4 us slower behind a decode
    of one request and nowhere faster (one H200, 2026-11-22).
    """
    x, how, out = x.contiguous(), quant.how, quant.out
    epilogue = epilogue_arguments(quant, x.dtype)
    with torch.cuda.device_of(x):
        if how.scheme in ("fp8_row", "fp8_tensor"):
            _launch_rows(x, out, epilogue)
        else:
            _launch_heads(x, out, how, epilogue)
    return out


def _launch_heads(
    x: torch.Tensor, out: torch.Tensor, how: OutputQuant, arguments: dict[str, Any]
) -> None:
    num_rows, width = x.shape[0], x.shape[1] * x.shape[2]
    # Heads do not matter here, only that no group is cut.
    size = math.gcd(width, 128)
    size = size if size % (how.group or 1) == 0 else how.group or width
    num_heads = width // size
    block_m = max(2048 // next_power_of_2(size), 1)
    constants = {"NUM_HEADS": num_heads, "HEAD_SIZE": size, "BLOCK_M": block_m}
    constants["PADDED_HEAD_SIZE"] = next_power_of_2(size)
    grid = (cdiv(num_rows * num_heads, block_m),)
    quantize_heads_kernel[grid](out, x, num_rows, **arguments, **constants)


def _launch_rows(x: torch.Tensor, out: torch.Tensor, epilogue: dict[str, Any]) -> None:
    num_rows, width = x.shape[0], x.shape[1] * x.shape[2]
    block = min(next_power_of_2(width), ROW_VALUES)
    how, largest = epilogue["HOW"], out
    if how[0] == TENSOR.value:
        largest = torch.zeros(1, dtype=torch.int32, device=x.device)
        constants = {"HOW": how, "BLOCK": TILE}
        largest_kernel[(cdiv(x.numel(), TILE),)](largest, x, x.numel(), **constants)
    constants = epilogue | {"WIDTH": width, "BLOCK": block}
    constants["num_warps"] = max(min(block // 512, 16), 1)
    quantize_rows_kernel[(num_rows,)](out, x, largest, **constants)
