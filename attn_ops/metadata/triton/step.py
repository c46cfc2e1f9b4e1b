"""A step's positions, slots and lengths on the device, one kernel each.

No launch depends on a value of the batch, so that a captured launch is right for every batch of
the same sizes.

S requests, T rows, M blocks a request may own, B block size.
"""

import torch
import triton
import triton.language as tl

from attn_ops.integers import cdiv

ROWS = 256
"""Rows of one program; four warps hold two of them a thread."""

PAD_SLOT = tl.constexpr(-1)


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "max_blocks", "stride_table", "steps"])
def positions_and_slots_kernel(
    positions_ptr,  # [T] int64
    slots_ptr,  # [T] int64
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, M] int32
    num_reqs,
    num_rows,
    max_blocks,
    stride_table,
    steps,  # halvings that a search over S requests needs
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (ceil(T / ROWS),). Each row finds its request by bisection of query_start_loc."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < num_rows
    low_R = tl.zeros(
        [ROWS], tl.int32
    )  # the first request that ends behind the row is in [low, high]
    high_R = low_R + num_reqs
    for _ in range(steps):
        open_R = low_R < high_R
        middle_R = (low_R + high_R) // 2
        end_R = tl.load(query_start_loc_ptr + 1 + middle_R, mask=open_R, other=0)
        low_R = tl.where(open_R & (end_R <= row_R), middle_R + 1, low_R)
        high_R = tl.where(open_R & (end_R > row_R), middle_R, high_R)
    owned_R = inside_R & (low_R < num_reqs)
    end_R = tl.load(query_start_loc_ptr + 1 + low_R, mask=owned_R, other=0)
    seq_len_R = tl.load(seq_lens_ptr + low_R, mask=owned_R, other=0)
    position_R = tl.where(owned_R, seq_len_R - end_R + row_R, 0)
    shown_R = tl.maximum(position_R, 0).to(tl.int64)
    tl.store(positions_ptr + row_R, shown_R, mask=inside_R)
    index_R = position_R // BLOCK_SIZE
    in_table_R = owned_R & (position_R >= 0) & (index_R < max_blocks)
    entry_R = low_R.to(tl.int64) * stride_table + index_R
    block_R = tl.load(table_ptr + entry_R, mask=in_table_R, other=0).to(tl.int64)
    slot_R = tl.where(in_table_R, block_R * BLOCK_SIZE + position_R % BLOCK_SIZE, PAD_SLOT)
    tl.store(slots_ptr + row_R, slot_R, mask=inside_R)


def launch_positions_and_slots(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Arguments as `positions_and_slots` has checked them."""
    num_reqs, max_blocks = block_table.shape
    num_rows = positions.shape[0]
    if num_rows == 0:
        return
    with torch.cuda.device_of(seq_lens):
        positions_and_slots_kernel[(cdiv(num_rows, ROWS),)](
            positions,
            slot_mapping,
            query_start_loc,
            seq_lens,
            block_table,
            num_reqs,
            num_rows,
            max_blocks,
            block_table.stride(0),
            num_reqs.bit_length(),
            BLOCK_SIZE=block_size,
            ROWS=ROWS,
        )


@triton.jit(do_not_specialize=["num_reqs", "max_blocks", "stride_table"])
def advance_step_kernel(
    sampled_ptr,  # [S] int32 or int64
    input_tokens_ptr,  # [S] int32 or int64
    positions_ptr,  # [S] int64
    seq_lens_ptr,  # [S] int32
    slots_ptr,  # [S] int64
    table_ptr,  # [S, M] int32
    active_ptr,  # [S] bool, read if HAS_ACTIVE
    num_reqs,
    max_blocks,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (ceil(S / ROWS),)."""
    request_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = request_R < num_reqs
    seq_len_R = tl.load(seq_lens_ptr + request_R, mask=inside_R, other=0)
    index_R = seq_len_R // BLOCK_SIZE
    advances_R = inside_R & (seq_len_R > 0) & (index_R < max_blocks)
    if HAS_ACTIVE:
        active_R = tl.load(active_ptr + request_R, mask=inside_R, other=0)
        advances_R = advances_R & (active_R != 0)
    entry_R = request_R.to(tl.int64) * stride_table + index_R
    block_R = tl.load(table_ptr + entry_R, mask=advances_R, other=0).to(tl.int64)
    slot_R = tl.where(advances_R, block_R * BLOCK_SIZE + seq_len_R % BLOCK_SIZE, PAD_SLOT)
    sampled_R = tl.load(sampled_ptr + request_R, mask=advances_R, other=0)
    tl.store(slots_ptr + request_R, slot_R, mask=inside_R)
    tl.store(input_tokens_ptr + request_R, sampled_R, mask=advances_R)
    tl.store(positions_ptr + request_R, seq_len_R.to(tl.int64), mask=advances_R)
    tl.store(seq_lens_ptr + request_R, seq_len_R + 1, mask=advances_R)


@triton.jit(do_not_specialize=["num_reqs", "max_blocks", "stride_table", "num_indices"])
def paged_kv_kernel(
    indptr_ptr,  # [S + 1] int32
    indices_ptr,  # [num_indices] int32, written if HAS_INDICES
    last_page_len_ptr,  # [S] int32, written if HAS_LAST
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, M] int32
    num_reqs,
    max_blocks,
    stride_table,
    num_indices,
    BLOCK_SIZE: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    HAS_LAST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (S,). A program sums the pages of the requests before its own: no second kernel."""
    request = tl.program_id(0)
    t_T = tl.arange(0, TILE)
    before_T = tl.zeros([TILE], tl.int32)
    for first in range(0, request, TILE):
        mask_T = first + t_T < request
        seq_len_T = tl.load(seq_lens_ptr + first + t_T, mask=mask_T, other=0)
        before_T += (seq_len_T + BLOCK_SIZE - 1) // BLOCK_SIZE
    begin = tl.sum(before_T)
    seq_len = tl.load(seq_lens_ptr + request)
    pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    if request == 0:
        tl.store(indptr_ptr, 0)
    tl.store(indptr_ptr + request + 1, begin + pages)
    if HAS_LAST:
        tl.store(last_page_len_ptr + request, seq_len - tl.maximum(pages - 1, 0) * BLOCK_SIZE)
    if HAS_INDICES:
        row_ptr = table_ptr + request.to(tl.int64) * stride_table
        for first in range(0, tl.minimum(pages, max_blocks), TILE):
            page_T = first + t_T
            mask_T = (page_T < pages) & (page_T < max_blocks) & (begin + page_T < num_indices)
            block_T = tl.load(row_ptr + page_T, mask=mask_T, other=0)
            tl.store(indices_ptr + begin + page_T, block_T, mask=mask_T)


def launch_advance_step(
    sampled_token_ids: torch.Tensor,
    input_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    active: torch.Tensor | None = None,
    paged_kv_indptr: torch.Tensor | None = None,
    paged_kv_indices: torch.Tensor | None = None,
    paged_kv_last_page_len: torch.Tensor | None = None,
) -> None:
    """Arguments as `advance_step` has checked them."""
    num_reqs, max_blocks = block_table.shape
    if num_reqs == 0:
        if paged_kv_indptr is not None:
            paged_kv_indptr.zero_()
        return
    with torch.cuda.device_of(seq_lens):
        advance_step_kernel[(cdiv(num_reqs, ROWS),)](
            sampled_token_ids,
            input_tokens,
            positions,
            seq_lens,
            slot_mapping,
            block_table,
            seq_lens if active is None else active,
            num_reqs,
            max_blocks,
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            HAS_ACTIVE=active is not None,
            ROWS=ROWS,
        )
        if paged_kv_indptr is None:
            return
        paged_kv_kernel[(num_reqs,)](
            paged_kv_indptr,
            paged_kv_indptr if paged_kv_indices is None else paged_kv_indices,
            paged_kv_indptr if paged_kv_last_page_len is None else paged_kv_last_page_len,
            seq_lens,
            block_table,
            num_reqs,
            max_blocks,
            block_table.stride(0),
            0 if paged_kv_indices is None else paged_kv_indices.shape[0],
            BLOCK_SIZE=block_size,
            HAS_INDICES=paged_kv_indices is not None,
            HAS_LAST=paged_kv_last_page_len is not None,
            TILE=ROWS,
        )
