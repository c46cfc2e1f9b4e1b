"""`finish_step` and `take_tokens`, a kernel each.

S requests, T rows, R rows of tokens, N steps without the host, M blocks a request may own, K stop
tokens.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv
from attn_ops.integrations.transformers.rotary import SHIFT

ROWS = 256
"""Requests that the program takes at a time."""

PAD_SLOT = tl.constexpr(-1)
SHIFTED = tl.constexpr(SHIFT)


@triton.jit(do_not_specialize=["num_reqs", "max_blocks", "num_steps"])
def finish_step_kernel(
    tokens_ptr,  # [S] int64, drawn
    ring_ptr,  # [N, S] int64
    step_ptr,  # [1] int64
    stops_ptr,  # [S, K] int64
    remaining_ptr,  # [S] int32
    active_ptr,  # [S] bool, as int8
    input_ids_ptr,  # [S] int64
    positions_ptr,  # [S] int64
    seq_lens_ptr,  # [S] int32
    slots_ptr,  # [S] int64
    table_ptr,  # [S, M] int32
    window_slots_ptr,  # [S] int64, if WINDOWS
    window_table_ptr,  # [S, M] int32, if WINDOWS
    num_reqs,
    max_blocks,
    num_steps,
    BLOCK_SIZE: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOWS: tl.constexpr,  # layers with a window have blocks of their own
    PDL: tl.constexpr,  # launched early
):
    """Grid (1,): the counter of steps is read by all and written by one."""
    wait_for_inputs(PDL)
    step = tl.load(step_ptr)
    ring_row_ptr = ring_ptr + (step % num_steps) * num_reqs
    for first in range(0, num_reqs, ROWS):
        request_R = first + tl.arange(0, ROWS)
        inside_R = request_R < num_reqs
        token_R = tl.load(tokens_ptr + request_R, mask=inside_R, other=0)
        tl.store(ring_row_ptr + request_R, token_R, mask=inside_R)
        active_R = tl.load(active_ptr + request_R, mask=inside_R, other=0) != 0
        remaining_R = tl.load(remaining_ptr + request_R, mask=inside_R, other=0)
        remaining_R -= active_R.to(tl.int32)
        tl.store(remaining_ptr + request_R, remaining_R, mask=inside_R)
        active_R = active_R & (remaining_R > 0)
        for k in tl.static_range(NUM_STOPS):
            stop_R = tl.load(stops_ptr + request_R * NUM_STOPS + k, mask=inside_R, other=-1)
            active_R = active_R & (stop_R != token_R)
        tl.store(active_ptr + request_R, active_R.to(tl.int8), mask=inside_R)
        seq_len_R = tl.load(seq_lens_ptr + request_R, mask=inside_R, other=0)
        index_R = seq_len_R // BLOCK_SIZE
        goes_on_R = active_R & (seq_len_R > 0) & (index_R < max_blocks)
        entry_R = request_R.to(tl.int64) * max_blocks + index_R
        block_R = tl.load(table_ptr + entry_R, mask=goes_on_R, other=0).to(tl.int64)
        slot_R = block_R * BLOCK_SIZE + seq_len_R % BLOCK_SIZE
        tl.store(slots_ptr + request_R, tl.where(goes_on_R, slot_R, PAD_SLOT), mask=inside_R)
        if WINDOWS:
            block_R = tl.load(window_table_ptr + entry_R, mask=goes_on_R, other=0).to(tl.int64)
            slot_R = tl.where(goes_on_R, block_R * BLOCK_SIZE + seq_len_R % BLOCK_SIZE, PAD_SLOT)
            tl.store(window_slots_ptr + request_R, slot_R, mask=inside_R)
        tl.store(input_ids_ptr + request_R, token_R, mask=goes_on_R)
        position_R = tl.load(positions_ptr + request_R, mask=goes_on_R, other=0)
        position_R = position_R // SHIFTED * SHIFTED + seq_len_R
        tl.store(positions_ptr + request_R, position_R, mask=goes_on_R)
        tl.store(seq_lens_ptr + request_R, seq_len_R + 1, mask=goes_on_R)
    tl.debug_barrier()  # every warp has read the counter
    tl.store(step_ptr, step + 1)


def launch_finish_step(
    tokens_S: torch.Tensor, tensors: Mapping[str, torch.Tensor], block_size: int
) -> None:
    """`finish_step` as a kernel, with the same arguments."""
    num_steps, num_reqs = tensors["tokens"].shape
    windows = "window_block_table" in tensors
    with torch.cuda.device_of(tokens_S):
        quick(finish_step_kernel, (1,))(
            tokens_S,
            tensors["tokens"],
            tensors["step"],
            tensors["stop_tokens"],
            tensors["remaining"],
            tensors["active"].view(torch.int8),
            tensors["input_ids"],
            tensors["position_ids"],
            tensors["seq_lens"],
            tensors["slot_mapping"],
            tensors["block_table"],
            tensors["window_slot_mapping" if windows else "slot_mapping"],
            tensors["window_block_table" if windows else "block_table"],
            num_reqs,
            tensors["block_table"].shape[1],
            num_steps,
            BLOCK_SIZE=block_size,
            NUM_STOPS=tensors["stop_tokens"].shape[1],
            ROWS=ROWS,
            WINDOWS=windows,
            **early_launch(tokens_S.device),
        )


"""Requests of one program."""


@triton.jit(do_not_specialize=["num_reqs"])
def take_tokens_kernel(
    input_ids_ptr,  # [T] int64
    drawn_ptr,  # [R] int64
    sources_ptr,  # [S] int32
    query_start_loc_ptr,  # [S + 1] int32
    num_reqs,
    ROWS: tl.constexpr,
):
    """Grid (ceil(S / ROWS),)."""
    request_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = request_R < num_reqs
    source_R = tl.load(sources_ptr + request_R, mask=inside_R, other=-1)
    taken_R = inside_R & (source_R >= 0)
    row_R = tl.load(query_start_loc_ptr + request_R, mask=taken_R, other=0)
    token_R = tl.load(drawn_ptr + source_R, mask=taken_R, other=0)
    tl.store(input_ids_ptr + row_R, token_R, mask=taken_R)


def launch_take_tokens(tensors: Mapping[str, torch.Tensor], drawn_R: torch.Tensor) -> None:
    """`take_tokens` as a kernel, with the same arguments."""
    (num_reqs,) = tensors["sources"].shape
    with torch.cuda.device_of(drawn_R):
        quick(take_tokens_kernel, (cdiv(num_reqs, ROWS),))(
            tensors["input_ids"],
            drawn_R,
            tensors["sources"],
            tensors["query_start_loc"],
            num_reqs,
            ROWS=ROWS,
        )
