"""How the kernel of `skinny_mm` is launched, and up to how many rows.

K inputs, M outputs.
"""

import functools
from typing import NamedTuple

import torch

from attn_ops.integers import next_power_of_2

MANY_OUTPUTS = 16384
"""Outputs from which the kernel is fast with more rows in bf16, and the library in FP8."""


_PROCESSORS = 132
"""Of a Hopper GPU: programs of the largest tiles that run at one time."""


class SkinnyConstants(NamedTuple):
    """Constants of a launch."""

    block_m: int  # rows of the weight a program
    block_k: int
    num_warps: int
    num_stages: int
    prefetch: int = 0  # tiles of the weight that are asked for before x is there
    rows_first: bool = False  # x is the left factor, for enough rows to fill the tensor cores


def block_of_rows(num_rows: int) -> int:
    """Rows of x that a program multiplies."""
    return min(max(16, next_power_of_2(num_rows)), 64)


def skinny_constants(m: int, fp8: bool, num_rows: int = 1) -> SkinnyConstants:
    """The best of 27 and 31 forms for the products of Llama-3-8B, at 1 and 8 rows; of 90 beyond.

    In bfloat16 all forms give the same bits; in FP8 they depend on the weight alone. One row of a
    weight of 28672 x 4096 takes 57 us in bfloat16, 30 in FP8 (one H200, Triton 3.6, 2026-11-22).
    64 rows of one of 4096 x 14336 take 45.8 us where cuBLAS takes 48.4, 128 rows 48.4 where it
    takes 53.1, and 256 rows 58.7 where it takes 57.5 (H100, 2026-11-26). `benchmarks.product_forms`
    tries 18 forms with norms, gates and residuals, as decode steps have them.
    """
    if fp8:
        return SkinnyConstants(64, 256, 4, 4 if m >= MANY_OUTPUTS else 6, prefetch=1)
    if m >= MANY_OUTPUTS:
        if _leaves_few(m):
            return SkinnyConstants(64, 128, 4, 3, prefetch=1)
        return SkinnyConstants(128, 128, 8, 4, prefetch=1)
    if num_rows > 16:
        return _of_more_rows(m, num_rows)
    if m > 8192:
        return SkinnyConstants(128, 64, 4, 6, 1)
    if m > 4096:
        return SkinnyConstants(64, 256, 4, 3)
    if m < 2048 or 3072 < m <= 4096:
        return SkinnyConstants(32, 256, 4, 6, 1)
    return SkinnyConstants(64, 128, 4, 6, 1)


def _leaves_few(m: int) -> bool:
    """Whether the largest tiles of m outputs fill the GPU once, and then less than half of it."""
    return _PROCESSORS < -(-m // 128) < _PROCESSORS * 3 // 2


def _of_more_rows(m: int, num_rows: int) -> SkinnyConstants:
    """Of more than 16 rows and few outputs: enough programs to fill the GPU."""
    if num_rows > 128 and m > 2048:
        return SkinnyConstants(128, 128, 4, 4, rows_first=True)
    if num_rows <= 128 and m <= 2048:
        return SkinnyConstants(16, 128, 4, 6, 1, rows_first=True)
    if num_rows <= 64 and m <= 4096:
        return SkinnyConstants(32, 128, 4, 6, 1, rows_first=True)
    return SkinnyConstants(64, 128, 4, 6, 1)


def most_rows(w: torch.Tensor) -> int:
    """Rows of x up to which our kernel is the faster one, as measured at 1, 8, 16, ... 128 rows."""
    many = w.shape[1] >= MANY_OUTPUTS
    if w.dtype == torch.float8_e4m3fn:
        return 32 if many else 64
    if many:
        return 16 if _leaves_few(w.shape[1]) else 64
    return 128 if 3072 <= w.shape[1] <= 4096 else 16


# Cached: a property of the device, asked by each product.
@functools.cache
def is_measured(device: torch.device) -> bool:
    """Whether the constants of these kernels were chosen on such a device: a Hopper GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
