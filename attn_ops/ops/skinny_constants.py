"""How the kernel of `skinny_mm` is launched, and up to how many rows.

K inputs, M outputs.
"""

from typing import NamedTuple

import torch

MANY_OUTPUTS = 16384
"""Outputs from which the kernel is fast with more rows in bf16, and the library in FP8."""


class SkinnyConstants(NamedTuple):
    """Constants of a launch."""

    block_m: int  # rows of the weight a program
    block_k: int
    num_warps: int
    num_stages: int
    prefetch: int = 0  # tiles of the weight that are asked for before x is there


def block_of_rows(num_rows: int) -> int:
    """Rows of x that a program multiplies."""
    return min(max(16, 1 << (num_rows - 1).bit_length()), 64)


def skinny_constants(m: int, fp8: bool, num_rows: int = 1) -> SkinnyConstants:
    """The best of 27 and 31 forms for the products of Llama-3-8B, at 1 and 8 rows.

    In bfloat16 all forms give the same bits; in FP8 they depend on the weight alone. One row of a
    weight of 28672 x 4096 takes 57 us in bfloat16, 30 in FP8 (one H200, Triton 3.6, 2026-11-22).
    """
    if fp8:
        return SkinnyConstants(64, 256, 4, 4 if m >= MANY_OUTPUTS else 6, prefetch=1)
    if m >= MANY_OUTPUTS:
        return SkinnyConstants(128, 128, 8, 4, prefetch=1)
    if m > 4096:
        return SkinnyConstants(64, 256, 4, 3)
    if num_rows > 16:  # tiles of x fill the shared memory
        return SkinnyConstants(32, 128, 4, 6, 1)
    return SkinnyConstants(32, 256, 4, 6, 1)


def most_rows(w: torch.Tensor) -> int:
    """Rows of x up to which our kernel is the faster one, as measured at 1, 8, 16, ... 64 rows."""
    many = w.shape[1] >= MANY_OUTPUTS
    if w.dtype == torch.float8_e4m3fn:
        return 32 if many else 64
    return 64 if many else 16
