"""The k-th largest number of every row as one kernel.

R rows, V numbers a row.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Numbers that a program takes at a time."""


@triton.jit
def ordered(x):
    """Unsigned integers in the order of the float32 numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where((bits >> 31) == 1, 0xFFFFFFFF, 0x80000000)


@triton.jit
def kth_largest_kernel(
    x_ptr,  # [R, V] float32
    k_ptr,  # [R] int32, 1 to V
    kth_ptr,  # [R] float32
    stride,  # of x's rows
    num_columns,
    BLOCK: tl.constexpr,
):
    """Grid (R,): a digit of eight bits at a time, from the highest, as radix sort would.

    Counts of integers only, so that the result is the same in any batch.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(k_ptr + row)
    digits = tl.arange(0, 256)
    found = tl.full((), 0, tl.uint32)
    for i in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for first in range(0, num_columns, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < num_columns
            key = ordered(tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0))
            if i > 0:
                inside = inside & ((key >> (32 - 8 * i)) == (found >> (32 - 8 * i)))
            digit = ((key >> (24 - 8 * i)) & 0xFF).to(tl.int32)
            counts += tl.histogram(digit, 256, mask=inside)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        chosen = tl.max(tl.where(at_least >= k, digits, 0), 0)
        k -= tl.sum(tl.where(digits > chosen, counts, 0), 0)
        found = found | (chosen.to(tl.uint32) << (24 - 8 * i))
    bits = found ^ tl.where((found >> 31) == 1, 0x80000000, 0xFFFFFFFF)
    tl.store(kth_ptr + row, bits.to(tl.float32, bitcast=True))


def kth_largest(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The k-th largest of each row of x [R, V] float32, no NaN, as [R]; k [R] int32, 1 to V."""
    kth = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if not x.shape[0]:
        return kth
    x = x if x.stride(1) == 1 else x.contiguous()
    with torch.cuda.device_of(x):
        kth_largest_kernel[(x.shape[0],)](
            x, k.contiguous(), kth, x.stride(0), x.shape[1], BLOCK=BLOCK, num_warps=8
        )
    return kth
