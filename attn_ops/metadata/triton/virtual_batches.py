"""Virtual batches of chunked local attention in one kernel.

S requests, V virtual batches, C chunk size, B block size, M blocks a request may own.
"""

import torch
import triton
import triton.language as tl

REQUESTS = 256
"""Requests that a program sums up at a time."""

BATCHES = 16
"""Virtual batches that a program writes at a time."""

PAGES = 64
"""Blocks of each that it writes at a time."""

SURPLUS = 256
"""Virtual batches that a program for the surplus looks after."""


@triton.jit
def first_and_last_chunk(query_start_loc_ptr, seq_lens_ptr, request, mask, CHUNK: tl.constexpr):
    """Chunks of a request's first query token and of its last token, and its tokens before."""
    begin = tl.load(query_start_loc_ptr + request, mask=mask, other=0)
    end = tl.load(query_start_loc_ptr + 1 + request, mask=mask, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=mask, other=0)
    computed = tl.maximum(seq_len - (end - begin), 0)  # padding requests have rows and no tokens
    last = tl.maximum(seq_len - 1, 0) // CHUNK
    return tl.minimum(computed // CHUNK, last), last, computed


@triton.jit
def count_before(
    query_start_loc_ptr, seq_lens_ptr, request, CHUNK: tl.constexpr, REQUESTS: tl.constexpr
):
    """Virtual batches of the requests before `request`."""
    r_R = tl.arange(0, REQUESTS)
    count_R = tl.zeros([REQUESTS], tl.int32)
    for begin in range(0, request, REQUESTS):
        mask_R = begin + r_R < request
        first_R, last_R, _ = first_and_last_chunk(
            query_start_loc_ptr, seq_lens_ptr, begin + r_R, mask_R, CHUNK
        )
        count_R += tl.where(mask_R, last_R - first_R + 1, 0)
    return tl.sum(count_R)


@triton.jit(
    do_not_specialize=["num_reqs", "num_batches", "max_blocks", "stride_table", "stride_local"]
)
def virtual_batches_kernel(
    local_start_ptr,  # [V + 1] int32
    local_seq_lens_ptr,  # [V] int32
    local_table_ptr,  # [V, C // B] int32
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, M] int32
    num_reqs,
    num_batches,  # V
    max_blocks,
    stride_table,
    stride_local,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
    BATCHES: tl.constexpr,
    PAGES: tl.constexpr,
    SURPLUS: tl.constexpr,
):
    """Grid (S + V // SURPLUS + 1,): a program a request, then programs for the surplus."""
    NUM_PAGES: tl.constexpr = CHUNK // BLOCK_SIZE
    request = tl.program_id(0)
    b_V = tl.arange(0, BATCHES)
    p_P = tl.arange(0, PAGES)
    if request < num_reqs:
        before = count_before(query_start_loc_ptr, seq_lens_ptr, request, CHUNK, REQUESTS)
        first, last, computed = first_and_last_chunk(
            query_start_loc_ptr, seq_lens_ptr, request, True, CHUNK
        )
        row = tl.load(query_start_loc_ptr + request)
        seq_len = tl.load(seq_lens_ptr + request)
        row_ptr = table_ptr + request.to(tl.int64) * stride_table
        for done in range(0, last - first + 1, BATCHES):
            number_V = first + done + b_V
            target_V = before + done + b_V
            mask_V = (number_V <= last) & (target_V < num_batches)
            key_V = number_V * CHUNK
            start_V = row + tl.maximum(computed, key_V) - computed
            tl.store(local_start_ptr + target_V, start_V, mask=mask_V)
            keys_V = tl.minimum(key_V + CHUNK, seq_len) - key_V
            tl.store(local_seq_lens_ptr + target_V, keys_V, mask=mask_V)
            for page in range(0, NUM_PAGES, PAGES):
                mask_VP = mask_V[:, None] & (page + p_P < NUM_PAGES)[None, :]
                entry_VP = (key_V // BLOCK_SIZE)[:, None] + (page + p_P)[None, :]
                entry_VP = tl.minimum(entry_VP, max_blocks - 1)
                block_VP = tl.load(row_ptr + entry_VP, mask=mask_VP & (max_blocks > 0), other=0)
                local_VP = target_V.to(tl.int64)[:, None] * stride_local + (page + p_P)[None, :]
                tl.store(local_table_ptr + local_VP, block_VP, mask=mask_VP)
    else:
        total = count_before(query_start_loc_ptr, seq_lens_ptr, num_reqs, CHUNK, REQUESTS)
        end = tl.load(query_start_loc_ptr + num_reqs)
        begin = (request - num_reqs) * SURPLUS
        # Entry V of local_start is written as well, whatever the batch: where the rows end.
        if request == tl.num_programs(0) - 1:
            tl.store(local_start_ptr + num_batches, end)
        for done in range(tl.maximum(begin, total), min(begin + SURPLUS, num_batches + 1), BATCHES):
            target_V = done + b_V
            own_V = target_V < begin + SURPLUS
            tl.store(local_start_ptr + target_V, end, mask=own_V & (target_V <= num_batches))
            mask_V = own_V & (target_V < num_batches)
            tl.store(local_seq_lens_ptr + target_V, 0, mask=mask_V)
            for page in range(0, NUM_PAGES, PAGES):
                mask_VP = mask_V[:, None] & (page + p_P < NUM_PAGES)[None, :]
                local_VP = target_V.to(tl.int64)[:, None] * stride_local + (page + p_P)[None, :]
                tl.store(local_table_ptr + local_VP, 0, mask=mask_VP)


def launch_virtual_batches(
    chunk: int,
    block_size: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    local_start: torch.Tensor,
    local_seq_lens: torch.Tensor,
    local_table: torch.Tensor,
) -> None:
    """Fill the last three tensors; see `make_local_attention_virtual_batches`."""
    (num_reqs, max_blocks), num_batches = block_table.shape, local_seq_lens.shape[0]
    with torch.cuda.device_of(seq_lens):
        virtual_batches_kernel[(num_reqs + num_batches // SURPLUS + 1,)](
            local_start,
            local_seq_lens,
            local_table,
            query_start_loc,
            seq_lens,
            block_table,
            num_reqs,
            num_batches,
            max_blocks,
            block_table.stride(0),
            local_table.stride(0),
            CHUNK=chunk,
            BLOCK_SIZE=block_size,
            REQUESTS=REQUESTS,
            BATCHES=BATCHES,
            PAGES=PAGES,
            SURPLUS=SURPLUS,
        )
