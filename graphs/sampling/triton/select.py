"""Thresholds of top-k and top-p together, with rows cut over programs.

1. `count_kernel`: how many numbers lie how far below the largest, in BINS steps of 1 / STEPS.
2. `bracket_kernel`: the bin of the k-th largest, and the bins between which top-p ends. A count
   says of a bin's probability as much as its width: a factor of exp(1 / STEPS).
3. `narrow_kernel`: the probability of PARTS of those bins, and of all that lies above them.
4. `gather_bins_kernel`: the numbers of the k-th's bin, and of the part in which top-p ends.
5. `search_kernel`: the thresholds among the gathered numbers, from the highest bit down.

Counts and probabilities are integers, so no sum depends on an order: a row has the same thresholds
in any batch. If many numbers lie in one bin, as when all are equal, the last kernel takes longer.

R rows, V numbers a row, C chunks of a row, B bins.
"""

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2

BINS = 256
"""A warp counts 32 numbers by ballots, in about BINS / 4 instructions a number."""

STEPS = 8
"""Bins a unit of the logits over the temperature. The last bin holds what is further below: its
numbers have no probability, as exp(-31) is less than 2**-40."""

PARTS = 6

CHUNK = 4096
"""Numbers of a program that counts or gathers."""

SEARCH = 2048
"""Gathered numbers that a program takes at a time."""

LOWEST = tl.constexpr(-float("inf"))
UNIT = tl.constexpr(2.0**40)
"""Of probabilities, which are added as integers."""

SLACK = tl.constexpr(1e-4)
"""Of a bin's probability, for roundings of differences and of exp."""


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
def mass(x, largest, least, inside):
    """exp(x - largest) in units of 2**-40, of numbers from `least` up."""
    weight = tl.where(x == largest, 1.0, tl.exp(x - largest))
    return tl.where(inside & (x >= least), (weight * UNIT).to(tl.int64), 0)


@triton.jit
def bin_of(x, largest, BINS: tl.constexpr, STEPS: tl.constexpr):
    """Bins in the order of the numbers, the largest first."""
    below = tl.where(x == largest, 0.0, (largest - x) * STEPS)
    return tl.minimum(below, BINS - 1).to(tl.int32)


@triton.jit
def load_chunk(x_ptr, row, stride, num_columns, CHUNK: tl.constexpr):
    """Numbers of program 1's chunk, -inf behind the last, and which of them there are."""
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = columns < num_columns
    return tl.load(x_ptr + row * stride + columns, mask=inside, other=LOWEST), inside


@triton.jit
def count_kernel(
    counts_ptr,  # [R, B] int32, zero
    x_ptr,  # [R, V] float32
    largest_ptr,  # [R] float32, of the row
    stride,  # of x's rows
    num_columns,
    BINS: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R, C). What is behind the last column counts as far below."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    x, inside = load_chunk(x_ptr, row, stride, num_columns, CHUNK)
    place = bin_of(x, tl.load(largest_ptr + row), BINS, STEPS)
    found = tl.histogram(tl.where(inside, place, BINS - 1), BINS)
    b_B = tl.arange(0, BINS)
    tl.atomic_add(counts_ptr + row * BINS + b_B, found, mask=found > 0, sem="relaxed")


@triton.jit
def bracket_kernel(
    brackets_ptr,  # [R, 4] int32: bin and rank of the k-th largest, first and last bin of top-p
    bounds_ptr,  # [R, 2] int64: probability that top-k leaves of the k-th's bin, at least, at most
    counts_ptr,  # [R, B] int32
    k_ptr,  # [R] int32, 1 to V
    top_p_ptr,  # [R] float32
    num_columns,
    BINS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R,). A row that keeps all has bin BINS, of no number."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    b_B = tl.arange(0, BINS)
    count_B = tl.load(counts_ptr + row * BINS + b_B)
    k = tl.load(k_ptr + row)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    up_to_B = tl.cumsum(count_B, 0)
    bin_k = tl.where(k < num_columns, tl.sum((up_to_B < k).to(tl.int32), 0), BINS)
    rank = k - tl.sum(tl.where(b_B < bin_k, count_B, 0), 0)
    least_B = tl.where(b_B < bin_k, count_B, tl.where(b_B == bin_k, rank, 0)).to(tl.float64)
    most_B = tl.where(b_B <= bin_k, count_B, 0).to(tl.float64)
    weight_B = tl.exp(-b_B.to(tl.float32) / STEPS).to(tl.float64)
    next_B = tl.exp(-(b_B + 1).to(tl.float32) / STEPS).to(tl.float64)
    low_B = least_B * tl.maximum(next_B * UNIT * (1.0 - SLACK) - 1.0, 0.0)
    high_B = most_B * (weight_B * UNIT * (1.0 + SLACK))
    wanted_low = tl.sum(low_B, 0) * top_p * (1.0 - SLACK)
    wanted_high = tl.sum(high_B, 0) * top_p * (1.0 + SLACK) + 1.0
    first = tl.sum((tl.cumsum(high_B, 0) * (1.0 + SLACK) < wanted_low).to(tl.int32), 0)
    last = tl.sum((tl.cumsum(low_B, 0) * (1.0 - SLACK) < wanted_high).to(tl.int32), 0)
    last = tl.minimum(last, BINS - 2)  # the last bin has no probability
    tl.store(brackets_ptr + row * 4, bin_k)
    tl.store(brackets_ptr + row * 4 + 1, rank)
    tl.store(brackets_ptr + row * 4 + 2, first)
    tl.store(brackets_ptr + row * 4 + 3, last)
    own_B = b_B == bin_k
    tl.store(bounds_ptr + row * 2, tl.sum(tl.where(own_B, low_B, 0.0), 0).to(tl.int64))
    tl.store(bounds_ptr + row * 2 + 1, tl.sum(tl.where(own_B, high_B, 0.0), 0).to(tl.int64) + 1)


@triton.jit
def width_of(first, last, PARTS: tl.constexpr):
    """Bins of a part; at least one."""
    return tl.maximum((last - first + PARTS) // PARTS, 1)


@triton.jit
def narrow_kernel(
    sums_ptr,  # [R, PARTS + 2] int64, zero: above the first bin, in each part, behind the last bin
    x_ptr,  # [R, V] float32
    largest_ptr,  # [R] float32
    brackets_ptr,  # [R, 4] int32
    top_p_ptr,  # [R] float32
    stride,  # of x's rows
    num_columns,
    BINS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R, C). Numbers of the k-th's bin and behind are left out."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(top_p_ptr + row) < 1.0:
        x, inside = load_chunk(x_ptr, row, stride, num_columns, CHUNK)
        largest, bin_k = tl.load(largest_ptr + row), tl.load(brackets_ptr + row * 4)
        first, last = tl.load(brackets_ptr + row * 4 + 2), tl.load(brackets_ptr + row * 4 + 3)
        place = bin_of(x, largest, BINS, STEPS)
        piece = mass(x, largest, LOWEST, inside & (place < bin_k))
        part = (place - first) // width_of(first, last, PARTS)
        part = tl.where(place < first, -1, tl.where(place > last, PARTS, part))
        for i in tl.static_range(PARTS + 2):
            total = tl.sum(tl.where(part == i - 1, piece, 0), 0)
            if total > 0:
                tl.atomic_add(sums_ptr + row * (PARTS + 2) + i, total, sem="relaxed")


@triton.jit
def narrowed(sums_ptr, brackets_ptr, bounds_ptr, row, top_p, PARTS: tl.constexpr):
    """First and last bin in which top-p ends, and probability above the first."""
    first, last = tl.load(brackets_ptr + row * 4 + 2), tl.load(brackets_ptr + row * 4 + 3)
    total = tl.full((), 0, tl.int64)
    for i in tl.static_range(PARTS + 2):
        total += tl.load(sums_ptr + row * (PARTS + 2) + i)
    low = (total + tl.load(bounds_ptr + row * 2)).to(tl.float64) * top_p.to(tl.float64)
    high = (total + tl.load(bounds_ptr + row * 2 + 1)).to(tl.float64) * top_p.to(tl.float64)
    wanted_low, wanted_high = low.to(tl.int64) - 1, high.to(tl.int64) + 2
    width = width_of(first, last, PARTS)
    up_to = tl.load(sums_ptr + row * (PARTS + 2))
    above = up_to
    new_first, new_last = first, first + width - 1
    for i in tl.static_range(PARTS):
        up_to += tl.load(sums_ptr + row * (PARTS + 2) + i + 1)
        before = up_to < wanted_low
        above = tl.where(before, up_to, above)
        new_first = tl.where(before, first + (i + 1) * width, new_first)
        new_last = tl.where(up_to < wanted_high, first + (i + 2) * width - 1, new_last)
    return new_first, tl.minimum(new_last, last), above


@triton.jit
def gather_bins_kernel(
    gathered_ptr,  # [R, V] float32: of the k-th's bin from the left, of top-p from the right
    sizes_ptr,  # [R, 2] int32, zero: how many
    x_ptr,  # [R, V] float32
    largest_ptr,  # [R] float32
    brackets_ptr,  # [R, 4] int32
    bounds_ptr,  # [R, 2] int64
    sums_ptr,  # [R, PARTS + 2] int64
    top_p_ptr,  # [R] float32
    stride,  # of x's rows
    num_columns,
    BINS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R, C)."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    x, inside = load_chunk(x_ptr, row, stride, num_columns, CHUNK)
    top_p = tl.load(top_p_ptr + row)
    bin_k = tl.load(brackets_ptr + row * 4)
    place = bin_of(x, tl.load(largest_ptr + row), BINS, STEPS)
    of_k = inside & (place == bin_k)
    row_ptr = gathered_ptr + row * num_columns
    num_k = tl.sum(of_k.to(tl.int32), 0)
    if num_k > 0:
        begin = tl.atomic_add(sizes_ptr + row * 2, num_k, sem="relaxed")
        tl.store(row_ptr + begin + tl.cumsum(of_k.to(tl.int32), 0) - 1, x, mask=of_k)
    if top_p < 1.0:
        first, last, _ = narrowed(sums_ptr, brackets_ptr, bounds_ptr, row, top_p, PARTS)
        of_p = inside & (place >= first) & (place <= last) & (place < bin_k)
        num_p = tl.sum(of_p.to(tl.int32), 0)
        if num_p > 0:
            begin = num_columns - tl.atomic_add(sizes_ptr + row * 2 + 1, num_p, sem="relaxed")
            tl.store(row_ptr + begin - tl.cumsum(of_p.to(tl.int32), 0), x, mask=of_p)


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
def of_rank(ptr, size, rank, BLOCK: tl.constexpr):
    """The number of a rank, 1 for the largest: two bits a pass."""
    found = tl.full((), 0, tl.uint32)
    step = tl.full((), 0x40000000, tl.uint32)
    for _ in range(16):
        found += digit_of_count(ptr, size, found, step, rank, BLOCK) * step
        step = step >> 2
    return number(found)


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
def search_kernel(
    threshold_ptr,  # [R] float32
    gathered_ptr,  # [R, V] float32
    sizes_ptr,  # [R, 2] int32
    largest_ptr,  # [R] float32
    brackets_ptr,  # [R, 4] int32
    bounds_ptr,  # [R, 2] int64
    sums_ptr,  # [R, PARTS + 2] int64
    k_ptr,  # [R] int32
    top_p_ptr,  # [R] float32
    num_columns,
    PARTS: tl.constexpr,
    SEARCH: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R,): two bits a pass over what was gathered."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    largest, top_p = tl.load(largest_ptr + row), tl.load(top_p_ptr + row)
    num_k, num_p = tl.load(sizes_ptr + row * 2), tl.load(sizes_ptr + row * 2 + 1)
    of_k_ptr = gathered_ptr + row * num_columns
    of_p_ptr = of_k_ptr + num_columns - num_p
    kth = LOWEST
    if tl.load(k_ptr + row) < num_columns:
        rank = tl.load(brackets_ptr + row * 4 + 1)
        kth = of_rank(of_k_ptr, num_k, rank, SEARCH)
    threshold = kth
    if top_p < 1.0:
        found = tl.full((), 0, tl.uint32)
        step = tl.full((), 0x40000000, tl.uint32)
        total, _, _ = masses(of_k_ptr, num_k, largest, kth, found, found, SEARCH)
        for i in tl.static_range(PARTS + 2):
            total += tl.load(sums_ptr + row * (PARTS + 2) + i)
        _, _, above = narrowed(sums_ptr, brackets_ptr, bounds_ptr, row, top_p, PARTS)
        wanted = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64) - above
        for _ in range(16):
            one, two, three = masses(of_p_ptr, num_p, largest, LOWEST, found, step, SEARCH)
            k_1, k_2, k_3 = masses(of_k_ptr, num_k, largest, kth, found, step, SEARCH)
            digit = (one + k_1 >= wanted).to(tl.uint32) + (two + k_2 >= wanted).to(tl.uint32)
            found += (digit + (three + k_3 >= wanted).to(tl.uint32)) * step
            step = step >> 2
        threshold = tl.maximum(kth, number(found))
    tl.store(threshold_ptr + row, threshold)


def thresholds(x: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least number of each row that top-k and then top-p keep, -inf for all: [R] float32.

    x [R, V] float32 holds no NaN, k [R] int32 is from 1 to V, top_p [R] float32 is above 0.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_columns = x.shape
    assert num_columns < 1 << 20, "twenty bits count a row's numbers"
    device = x.device
    largest, top_p, k = x.amax(dim=-1), top_p.contiguous(), k.contiguous()
    # One fill for all that kernels add to: int64 in front, where it is aligned.
    num_sums = num_rows * (PARTS + 2)
    zeros = torch.zeros(2 * num_sums + num_rows * (BINS + 2), dtype=torch.int32, device=device)
    sums, counts, sizes = zeros.split([2 * num_sums, num_rows * BINS, num_rows * 2])
    sums = sums.view(torch.int64)
    brackets = torch.empty(num_rows, 4, dtype=torch.int32, device=device)
    bounds = torch.empty(num_rows, 2, dtype=torch.int64, device=device)
    gathered, threshold = torch.empty_like(x), torch.empty_like(largest)
    padded = next_power_of_2(num_columns)
    chunk, search = min(CHUNK, padded), min(SEARCH, padded)
    grid = (num_rows, cdiv(num_columns, chunk))
    row = (x, largest)
    size = (x.stride(0), num_columns)
    bins = {"BINS": BINS, "STEPS": STEPS, **early_launch(device)}
    chunks = {"CHUNK": chunk, "num_warps": 8, **bins}
    with torch.cuda.device_of(x):
        count_kernel[grid](counts, *row, *size, **chunks)
        bracket_kernel[(num_rows,)](brackets, bounds, counts, k, top_p, num_columns, **bins)
        narrow_kernel[grid](sums, *row, brackets, top_p, *size, PARTS=PARTS, **chunks)
        gather_bins_kernel[grid](
            gathered, sizes, *row, brackets, bounds, sums, top_p, *size, PARTS=PARTS, **chunks
        )
        search_kernel[(num_rows,)](
            threshold, gathered, sizes, largest, brackets, bounds, sums, k, top_p, num_columns,
            PARTS=PARTS, SEARCH=search, num_warps=8, **early_launch(device),
        )  # fmt: skip
    return threshold
