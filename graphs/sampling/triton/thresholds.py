"""Thresholds of top-k and top-p: one kernel each, one program a row.

Both find the bits of the threshold from the highest down. They count what lies above it: tokens for
top-k, probability as integers for top-p. No sum depends on an order, so a row has the same
threshold in any batch and in every call. R rows, V numbers a row.
"""

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""Numbers that a program takes at a time."""

WARPS = 32

LOWEST = tl.constexpr(-float("inf"))
UNIT = tl.constexpr(2.0**40)


@triton.jit
def ordered(x):
    """Unsigned integers in the order of the float32 numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where((bits >> 31) == 1, 0xFFFFFFFF, 0x80000000)


@triton.jit
def number(key):
    """The float32 number of an `ordered` integer."""
    bits = key ^ tl.where((key >> 31) == 1, 0x80000000, 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def kth_largest_kernel(
    x_ptr,  # [R, V] float32
    k_ptr,  # [R] int32, 1 to V
    kth_ptr,  # [R] float32
    stride,  # of x's rows
    num_columns,
    BLOCK: tl.constexpr,
):
    """Grid (R,): two bits a pass. A row that keeps all gets -inf."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(k_ptr + row)
    kth = LOWEST
    if k < num_columns:
        found = tl.full((), 0, tl.uint32)
        step = tl.full((), 0x40000000, tl.uint32)
        for _ in range(16):
            one, two, three = found + step, found + 2 * step, found + 3 * step
            counts = tl.zeros((BLOCK,), tl.int32)  # of three digits, ten bits each
            for first in range(0, num_columns, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                inside = columns < num_columns
                x = tl.load(x_ptr + row * stride + columns, mask=inside, other=LOWEST)
                key = tl.where(inside, ordered(x), 0)
                counts += (key >= one).to(tl.int32)
                counts += tl.where(key >= two, 1 << 10, 0)
                counts += tl.where(key >= three, 1 << 20, 0)
            digit = (tl.sum(counts & 0x3FF, 0) >= k).to(tl.uint32)
            digit += (tl.sum((counts >> 10) & 0x3FF, 0) >= k).to(tl.uint32)
            digit += (tl.sum(counts >> 20, 0) >= k).to(tl.uint32)
            found += digit * step
            step = step >> 2
        kth = number(found)
    tl.store(kth_ptr + row, kth)


@triton.jit
def mass(x, largest, least, inside):
    """exp(x - largest) in units of 2**-40, of numbers from `least` up."""
    weight = tl.where(x == largest, 1.0, tl.exp(x - largest))
    return tl.where(inside & (x >= least), (weight * UNIT).to(tl.int64), 0)


@triton.jit
def nucleus_kernel(
    x_ptr,  # [R, V] float32
    largest_ptr,  # [R] float32, of the row
    least_ptr,  # [R] float32, tokens below have no probability
    top_p_ptr,  # [R] float32
    threshold_ptr,  # [R] float32
    stride,  # of x's rows
    num_columns,
    BLOCK: tl.constexpr,
):
    """Grid (R,): two bits a pass. A row of top_p 1 or more gets -inf."""
    row = tl.program_id(0).to(tl.int64)
    largest, least = tl.load(largest_ptr + row), tl.load(least_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    threshold = LOWEST
    if top_p < 1.0:
        sums = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, num_columns, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < num_columns
            x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0)
            sums += mass(x, largest, least, inside)
        wanted = tl.ceil(tl.sum(sums, 0).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        found = tl.full((), 0, tl.uint32)
        step = tl.full((), 0x40000000, tl.uint32)
        for _ in range(16):
            one, two, three = found + step, found + 2 * step, found + 3 * step
            sums_1 = tl.zeros((BLOCK,), tl.int64)
            sums_2 = tl.zeros((BLOCK,), tl.int64)
            sums_3 = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, num_columns, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                inside = columns < num_columns
                x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0)
                part, key = mass(x, largest, least, inside), ordered(x)
                sums_1 += tl.where(key >= one, part, 0)
                sums_2 += tl.where(key >= two, part, 0)
                sums_3 += tl.where(key >= three, part, 0)
            digit = (tl.sum(sums_1, 0) >= wanted).to(tl.uint32)
            digit += (tl.sum(sums_2, 0) >= wanted).to(tl.uint32)
            digit += (tl.sum(sums_3, 0) >= wanted).to(tl.uint32)
            found += digit * step
            step = step >> 2
        threshold = number(found)
    tl.store(threshold_ptr + row, threshold)


def kth_largest(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The k-th largest of each row, -inf for k = V: [R] of x [R, V] float32 and k [R] int32.

    x holds no NaN, k is from 1 to V.
    """
    x = _checked(x)
    kth = torch.empty_like(x[:, 0])
    with torch.cuda.device_of(x):
        kth_largest_kernel[(len(x),)](
            x, k.contiguous(), kth, x.stride(0), x.shape[1], BLOCK=BLOCK, num_warps=WARPS
        )
    return kth


def nucleus(x: torch.Tensor, least: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least number of each row that top-p keeps, -inf for 1: [R] of x [R, V], all float32.

    Only numbers from `least` [R] up count. x holds no NaN, top_p [R] is above 0.
    """
    x = _checked(x)
    threshold = torch.empty_like(least)
    with torch.cuda.device_of(x):
        nucleus_kernel[(len(x),)](
            x, x.amax(dim=-1), least.contiguous(), top_p.contiguous(), threshold,
            x.stride(0), x.shape[1], BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return threshold


def _checked(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[1] < 1023 * BLOCK, "ten bits of a lane count the blocks of a row"
    return x if x.stride(1) == 1 else x.contiguous()
