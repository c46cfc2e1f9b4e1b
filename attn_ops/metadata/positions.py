"""Where the rows of a step stand: their positions in their sequences and their slots in the cache.

S requests, T rows, M blocks a request may own, B block size.
"""

import numpy as np
import torch

from attn_ops.metadata.validation import check_apart, check_int, check_tensor

PAD_SLOT_ID = -1
"""Slot of a padding row. The KV write sends it to the null block (block 0)."""


def positions_and_slots(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_tokens: int,
    *,
    positions: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position and slot of every row, computed on the device: one kernel on CUDA, capturable.

    Row t of request r stands at seq_lens[r] - query_start_loc[r + 1] + t. Rows behind the last
    request, and rows of padding requests (more rows than cached tokens), are padding: position 0
    and PAD_SLOT_ID. A position that the table has no block for gets PAD_SLOT_ID.

    Args:
        query_start_loc: [S+1] int32.
        seq_lens: [S] int32, this step's tokens included.
        block_table: [S, M] int32.
        block_size: tokens a block holds.
        num_tokens: T, padding rows included; rows of the batch behind it are left out.
        positions, slot_mapping: [T] int64, written in place and returned; None allocates.

    Raises:
        ValueError: dtypes, shapes or devices do not fit; nothing is written.
    """
    device, num_reqs = seq_lens.device, seq_lens.shape[0]
    check_int("block_size", block_size, 1)
    check_int("num_tokens", num_tokens, 0)
    check_tensor("query_start_loc", query_start_loc, (torch.int32,), (num_reqs + 1,), device)
    check_tensor("seq_lens", seq_lens, (torch.int32,), (num_reqs,), device)
    check_tensor("block_table", block_table, (torch.int32,), (num_reqs, None), device)
    if positions is None:
        positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    if slot_mapping is None:
        slot_mapping = torch.empty(num_tokens, dtype=torch.int64, device=device)
    check_tensor("positions", positions, (torch.int64,), (num_tokens,), device)
    check_tensor("slot_mapping", slot_mapping, (torch.int64,), (num_tokens,), device)
    check_apart(positions=positions, slot_mapping=slot_mapping)
    compute_positions_and_slots(
        query_start_loc, seq_lens, block_table, block_size, positions, slot_mapping
    )
    return positions, slot_mapping


def compute_positions_and_slots(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`positions_and_slots` of checked arguments."""
    compute = reference_positions_and_slots
    if seq_lens.device.type == "cuda":
        from attn_ops.metadata.triton.step import launch_positions_and_slots as compute
    compute(query_start_loc, seq_lens, block_table, block_size, positions, slot_mapping)


def reference_positions_and_slots(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`positions_and_slots` in plain PyTorch, on any device and without reading it."""
    num_reqs, max_blocks = block_table.shape
    if num_reqs == 0:
        positions.zero_()
        slot_mapping.fill_(PAD_SLOT_ID)
        return
    row_T = torch.arange(positions.shape[0], dtype=torch.int32, device=seq_lens.device)
    request_T = torch.searchsorted(query_start_loc[1:], row_T, right=True)
    owned_T = request_T < num_reqs
    request_T = request_T.clamp(max=num_reqs - 1)
    position_T = (seq_lens - query_start_loc[1:])[request_T].long() + row_T
    positions.copy_(torch.where(owned_T, position_T, 0).clamp(min=0))
    if max_blocks == 0:
        slot_mapping.fill_(PAD_SLOT_ID)
        return
    index_T = position_T.div(block_size, rounding_mode="floor")
    owned_T = owned_T & (index_T >= 0) & (index_T < max_blocks)
    block_T = block_table[request_T, index_T.clamp(0, max_blocks - 1)].long()
    slot_T = block_T * block_size + position_T % block_size
    slot_mapping.copy_(torch.where(owned_T, slot_T, PAD_SLOT_ID))


def positions_of_step(
    query_lens: np.ndarray, computed: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """Position of every query row in its sequence on the host: [T] int64."""
    num_tokens = int(start[-1])
    return np.arange(num_tokens, dtype=np.int64) + np.repeat(
        (computed - start[:-1]).astype(np.int64), query_lens
    )


def slots_of_step(
    query_lens: np.ndarray,
    computed: np.ndarray,
    start: np.ndarray,
    table_SM: np.ndarray,
    block_size: int,
) -> np.ndarray:
    """Cache slot of every query row on the host: [T] int64, block * block_size + offset."""
    positions_T = positions_of_step(query_lens, computed, start)
    request_T = np.repeat(np.arange(query_lens.size), query_lens)
    blocks_T = table_SM[request_T, positions_T // block_size].astype(np.int64)
    return blocks_T * block_size + positions_T % block_size
