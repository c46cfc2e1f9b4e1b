"""query_start_loc of the logits rows alone, in one kernel.

S requests, R entries of the logits indices.
"""

import torch
import triton
import triton.language as tl

ENTRIES = 1024
"""Logits indices that a program looks at at a time."""


@triton.jit(do_not_specialize=["num_entries", "num_logits"])
def logits_rows_kernel(
    new_start_ptr,  # [S + 1] int32
    query_start_loc_ptr,  # [S + 1] int32
    logits_indices_ptr,  # [R] int32 or int64
    num_logits_ptr,  # [1] int32, read if COUNT_ON_DEVICE
    num_entries,  # R
    num_logits,
    COUNT_ON_DEVICE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Grid (S + 1,): entry r is the number of logits rows before the rows of request r."""
    start = tl.load(query_start_loc_ptr + tl.program_id(0))
    if COUNT_ON_DEVICE:
        num_logits = tl.load(num_logits_ptr)
    i_R = tl.arange(0, ENTRIES)
    before_R = tl.zeros([ENTRIES], tl.int32)
    for begin in range(0, tl.minimum(num_logits, num_entries), ENTRIES):
        mask_R = begin + i_R < tl.minimum(num_logits, num_entries)
        row_R = tl.load(logits_indices_ptr + begin + i_R, mask=mask_R, other=-1)
        before_R += ((row_R >= 0) & (row_R < start)).to(tl.int32)
    tl.store(new_start_ptr + tl.program_id(0), tl.sum(before_R))


def launch_logits_rows(
    query_start_loc: torch.Tensor,
    logits_indices: torch.Tensor,
    num_logits: torch.Tensor | int,
    new_start: torch.Tensor,
) -> None:
    """Fill `new_start`; see `make_kv_sharing_fast_prefill_common_attn_metadata`."""
    on_device = isinstance(num_logits, torch.Tensor)
    with torch.cuda.device_of(query_start_loc):
        logits_rows_kernel[(query_start_loc.shape[0],)](
            new_start,
            query_start_loc,
            logits_indices,
            num_logits if on_device else query_start_loc,
            logits_indices.shape[0],
            0 if on_device else num_logits,
            COUNT_ON_DEVICE=on_device,
            ENTRIES=ENTRIES,
        )
