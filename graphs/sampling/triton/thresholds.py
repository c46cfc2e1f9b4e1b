"""Thresholds of top-k and top-p apart: one kernel each, one program a row, as `select` must find.

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
def digit_of_count(ptr, size, found, step, rank, BLOCK: tl.constexpr):
    """How many of the next two bits' values keep at least `rank` numbers."""
    counts = tl.zeros((BLOCK,), tl.int64)  # of three digits, twenty bits each
    for begin in range(0, size, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        key = ordered(tl.load(ptr + columns, mask=columns < size, other=LOWEST))
        key = tl.where(columns < size, key, 0)
        counts += (key >= found + step).to(tl.int64)
        counts += tl.where(key >= found + 2 * step, 1 << 20, 0).to(tl.int64)
        counts += tl.where(key >= found + 3 * step, 1 << 40, 0).to(tl.int64)
    total = tl.sum(counts, 0)
    digit = ((total & 0xFFFFF) >= rank).to(tl.uint32)
    digit += (((total >> 20) & 0xFFFFF) >= rank).to(tl.uint32)
    return digit + ((total >> 40) >= rank).to(tl.uint32)


@triton.jit
def mass(x, largest, least, inside):
    """exp(x - largest) in units of 2**-40, of numbers from `least` up."""
    weight = tl.where(x == largest, 1.0, tl.exp(x - largest))
    return tl.where(inside & (x >= least), (weight * UNIT).to(tl.int64), 0)


@triton.jit
def masses(ptr, size, largest, least, found, step, BLOCK: tl.constexpr):
    """Probability of the numbers from `least` up that each of three digits keeps."""
    sums_1 = tl.zeros((BLOCK,), tl.int64)
    sums_2 = tl.zeros((BLOCK,), tl.int64)
    sums_3 = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, size, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < size
        x = tl.load(ptr + columns, mask=inside, other=0.0)
        part, key = mass(x, largest, least, inside), ordered(x)
        sums_1 += tl.where(key >= found + step, part, 0)
        sums_2 += tl.where(key >= found + 2 * step, part, 0)
        sums_3 += tl.where(key >= found + 3 * step, part, 0)
    return tl.sum(sums_1, 0), tl.sum(sums_2, 0), tl.sum(sums_3, 0)


@triton.jit
def of_rank(ptr, size, rank, BLOCK: tl.constexpr):
    """The number of a rank, 1 for the largest: two bits a pass."""
    found = tl.full((), 0, tl.uint32)
    step = tl.full((), 0x40000000, tl.uint32)
    for _ in range(16):
        found += digit_of_count(ptr, size, found, step, rank, BLOCK) * step
        step = step >> 2
    return number(found)


@triton.jit
def kth_largest_kernel(
    x_ptr,  # [R, V] float32
    k_ptr,  # [R] int32, 1 to V
    kth_ptr,  # [R] float32
    stride,  # of x's rows
    num_columns,
    BLOCK: tl.constexpr,
):
    """Grid (R,). A row that keeps all gets -inf."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(k_ptr + row)
    kth = LOWEST
    if k < num_columns:
        kth = of_rank(x_ptr + row * stride, num_columns, k, BLOCK)
    tl.store(kth_ptr + row, kth)


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
    row_ptr = x_ptr + row * stride
    largest, least = tl.load(largest_ptr + row), tl.load(least_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    threshold = LOWEST
    if top_p < 1.0:
        found = tl.full((), 0, tl.uint32)
        step = tl.full((), 0x40000000, tl.uint32)
        total, _, _ = masses(row_ptr, num_columns, largest, least, found, found, BLOCK)
        wanted = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        for _ in range(16):
            one, two, three = masses(row_ptr, num_columns, largest, least, found, step, BLOCK)
            digit = (one >= wanted).to(tl.uint32) + (two >= wanted).to(tl.uint32)
            found += (digit + (three >= wanted).to(tl.uint32)) * step
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
    assert x.shape[1] < 1 << 20, "twenty bits count a row's numbers"
    return x if x.stride(1) == 1 else x.contiguous()
