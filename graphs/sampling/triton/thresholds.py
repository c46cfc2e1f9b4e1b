"""The threshold of a rank or of a probability among numbers of a row, for `select`.

Both find the bits of the threshold from the highest down, two a pass. They count what lies above
it: tokens for top-k, probability as integers for top-p. No sum depends on an order, so a row has
the same threshold in any batch and in every call.
"""

import triton
import triton.language as tl

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
