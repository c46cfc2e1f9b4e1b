"""Block-sparse layers on FLEX: which keys and tiles of keys the rows of a step see, by head.

T rows (padded as the plan's), C keys of all requests, N query heads, K kv heads, S requests,
R blocks of the longest sequence of the step, I tiles of rows, J tiles of keys.
"""

import dataclasses

import torch

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.flex.plan import KEY_TILE, FlexPlan
from attn_ops.block_layout.masks import visible_blocks
from attn_ops.metadata import AttentionMetadata


@dataclasses.dataclass(frozen=True, eq=False)
class LayoutMask:
    """One layout over the rows of one step."""

    tables: tuple[torch.Tensor, torch.Tensor]  # held: their addresses name the mask
    block_size: int
    seen_NRR: torch.Tensor  # bool: a block of rows sees a block of keys
    num_tiles_1NI: torch.Tensor  # int32, tiles of keys that a tile of rows visits
    tiles_1NIJ: torch.Tensor  # int32, which ones, in order
    keys_CK: torch.Tensor  # bool: keys that any row sees; others may be NaN


def layout_mask(
    meta: AttentionMetadata, plan: FlexPlan, options: AttentionOptions, num_kv_heads: int
) -> LayoutMask | None:
    """The mask of the layer's layout, made once a step and layout; None: the layer has none."""
    if options.block_layout is None or options.sparse_block_size is None:
        return None
    starts, columns, *_ = options.block_layout
    size, longest = options.sparse_block_size, meta.common.max_seq_len

    def make() -> LayoutMask:
        seen_NRR = visible_blocks(starts, columns, max(1, -(-longest // size)))
        tiles = _tiles(seen_NRR, size, plan)
        keys_CK = _keys(seen_NRR, size, plan, meta.common.seq_lens, num_kv_heads)
        return LayoutMask((starts, columns), size, seen_NRR, *tiles, keys_CK)

    addresses = starts.data_ptr(), columns.data_ptr()
    key = ("layout", size, num_kv_heads, starts.shape, columns.shape, *addresses)
    return meta.once(key, make)


def _row_blocks(plan: FlexPlan, size: int, num_blocks: int) -> torch.Tensor:
    """[T] int64: the block of each row; of padding rows any."""
    return (plan.position_T // size).clamp(0, num_blocks - 1).long()


def _tiles(seen_NRR: torch.Tensor, size: int, plan: FlexPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """num_tiles [1, N, I] and tiles [1, N, I, J], int32."""
    num_blocks = seen_NRR.shape[1]
    num_rows, num_tiles = plan.rows_6T.shape[1], -(-plan.num_keys // KEY_TILE)
    begin_J = torch.arange(num_tiles, device=seen_NRR.device) * KEY_TILE
    end_J = begin_J + KEY_TILE
    reached_TJ = (begin_J < plan.end_key_T[:, None]) & (end_J > plan.first_key_T[:, None])
    first_TJ = ((begin_J - plan.start_T[:, None]) // size).clamp(0, num_blocks)
    behind_TJ = ((end_J - 1 - plan.start_T[:, None]) // size + 1).clamp(0, num_blocks)
    row_T = _row_blocks(plan, size, num_blocks)
    pad = -num_rows % plan.row_tile
    seen_by_head = []
    for seen_RR in seen_NRR:
        # Blocks that are seen, counted up to each: of a tile's blocks one is, if the count grows.
        counted_TR = torch.nn.functional.pad(seen_RR.int().cumsum(1), (1, 0))[row_T]
        grows_TJ = counted_TR.gather(1, behind_TJ.long()) > counted_TR.gather(1, first_TJ.long())
        padded_TJ = torch.nn.functional.pad(grows_TJ & reached_TJ, (0, 0, 0, pad))
        seen_by_head.append(padded_TJ.view(-1, plan.row_tile, num_tiles).any(1))
    # No views of the results: Dynamo would guard on what they are views of.
    seen_1NIJ = torch.stack(seen_by_head)[None]
    order_1NIJ = seen_1NIJ.int().argsort(dim=-1, descending=True, stable=True)
    return seen_1NIJ.sum(-1, dtype=torch.int32), order_1NIJ.int()


def _keys(
    seen_NRR: torch.Tensor,
    size: int,
    plan: FlexPlan,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
) -> torch.Tensor:
    """[C, K] bool: keys that a row of their request sees."""
    num_blocks, device = seen_NRR.shape[1], seen_NRR.device
    row_T = _row_blocks(plan, size, num_blocks)
    alive_T = plan.alive_T != 0
    ends_S = seq_lens.cumsum(0)
    key_C = torch.arange(plan.num_keys, device=device)
    request_C = torch.searchsorted(ends_S, key_C, right=True).clamp(max=len(ends_S) - 1)
    block_C = ((key_C - (ends_S - seq_lens)[request_C]) // size).clamp(0, num_blocks - 1)
    found = []
    for seen_KRR in seen_NRR.view(num_kv_heads, -1, num_blocks, num_blocks):
        seen_TR = (seen_KRR.any(0)[row_T] & alive_T[:, None]).float()
        seen_SR = torch.zeros(len(ends_S), num_blocks, device=device)
        seen_SR.index_add_(0, plan.request_T.long(), seen_TR)
        found.append(seen_SR[request_C, block_C] > 0)
    return torch.stack(found, 1)
