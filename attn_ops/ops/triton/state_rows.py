"""What kernels of layers with a state share: a request's rows, padding, step sizes."""

import torch
import triton
import triton.language as tl

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""slots, starts, seq_lens, and kept."""


@triton.jit
def request_rows(slots_ptr, starts_ptr, seq_lens_ptr, num_rows, LONG: tl.constexpr):
    """The program's request: slot, first row, number of rows, tokens that its state has seen.

    And the rows that it fills with 0: its own if it is padding, and behind the last request all
    that are left. A request of LONG rows or more has none here; None: there are no such.
    """
    request = tl.program_id(2)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    first = tl.load(starts_ptr + request).to(tl.int64)
    end = tl.load(starts_ptr + request + 1).to(tl.int64)
    num_seen = tl.load(seq_lens_ptr + request).to(tl.int64) - (end - first)
    padding = slot <= 0
    length = tl.where(padding, 0, end - first)
    if LONG is not None:
        length = tl.where(length >= LONG, 0, length)
    zero_first = tl.where(padding, first, end)
    zero_end = tl.where(request == tl.num_programs(2) - 1, num_rows, end)
    return slot, first, length, num_seen, zero_first, zero_end


@triton.jit
def zero_rows(out_ptr_X, stride, first, end, inside_X):
    for n in range(0, end - first):
        tl.store(out_ptr_X + (first + n) * stride, 0.0, mask=inside_X)


@triton.jit
def keep_behind(row, kept_ptr, pool_ptr_X, stride, state_X, inside_X):
    """Keep the state behind a row in the slot that is named for it, if one is; `pool_ptr_X`: in
    the null slot.
    """
    if kept_ptr is not None:
        slot = tl.load(kept_ptr + row).to(tl.int64)
        if slot > 0:
            ptr_X = pool_ptr_X + slot * stride
            tl.store(ptr_X, state_X.to(ptr_X.dtype.element_ty), mask=inside_X)


@triton.jit
def silu(x, ACC: tl.constexpr):
    one = tl.full((), 1.0, ACC)
    return x / (one + tl.exp(-x))


@triton.jit
def step_size(dt, bias_ptr, bias_at, inside, SOFTPLUS: tl.constexpr, ACC: tl.constexpr):
    """Rounded to the dtype of dt where PyTorch rounds."""
    DTYPE: tl.constexpr = dt.dtype
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + bias_at, mask=inside, other=0.0).to(DTYPE)
        dt = (dt.to(ACC) + bias.to(ACC)).to(DTYPE)
    if SOFTPLUS:
        x = dt.to(ACC)
        e = tl.exp(tl.minimum(x, 20.0))
        u = e + 1.0
        # log(1 + e) that keeps its digits where e is small (Kahan): Triton has no log1p.
        soft = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        dt = tl.where(x > 20.0, x, soft).to(DTYPE)
    return dt.to(ACC)
