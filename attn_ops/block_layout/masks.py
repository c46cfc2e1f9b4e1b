"""A layout as dense masks, and as FlexAttention's BlockMask.

N query heads, R blocks of the longest sequence, Q query tokens, C cached tokens.
"""

from typing import TYPE_CHECKING

import torch

from attn_ops.block_layout.layout import BlockLayout, check_length

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def visible_blocks(starts: torch.Tensor, columns: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[N, num_blocks, num_blocks] bool: which of the first blocks each of them sees.

    `starts` [N, R + 1] and `columns` [E] on any device, which is not read from the host.
    """
    place_C = torch.arange(num_blocks, device=starts.device)
    seen_NRR = starts.new_zeros((starts.shape[0], num_blocks, num_blocks + 1), dtype=torch.bool)
    for seen_RR, start_R in zip(seen_NRR, starts.long(), strict=True):
        place_RC = start_R[:num_blocks, None] + place_C
        listed_RC = place_RC < start_R[1 : num_blocks + 1, None]
        place_RC = place_RC.clamp(max=max(len(columns) - 1, 0))
        found_RC = columns[place_RC].long() if len(columns) else torch.zeros_like(place_RC)
        seen_RR.scatter_(1, torch.where(listed_RC, found_RC, num_blocks), True)
    return seen_NRR[:, :, :num_blocks].contiguous()


def token_mask(
    seen_NRR: torch.Tensor, block_size: int, num_queries: int, num_keys: int
) -> torch.Tensor:
    """[N, Q, C] bool: the blocks, not causality; the queries are the last of the keys."""
    device = seen_NRR.device
    row_Q = torch.arange(num_keys - num_queries, num_keys, device=device) // block_size
    column_C = torch.arange(num_keys, device=device) // block_size
    return seen_NRR[:, row_Q][:, :, column_C]


def dense_mask(layout: BlockLayout, num_queries: int, num_keys: int) -> torch.Tensor:
    """[N, Q, C] bool on the CPU: what each head's queries see, the last of `num_keys` tokens.

    Raises:
        ValueError: there are more queries than keys, or the layout is for shorter sequences.
    """
    if not 0 <= num_queries <= num_keys:
        raise ValueError(f"num_queries must be from 0 to {num_keys}, got {num_queries}")
    check_length(num_keys, layout.max_seqlen, "num_keys")
    num_blocks = -(-num_keys // layout.block_size)
    seen_NRR = visible_blocks(layout.starts, layout.columns, num_blocks)
    mask_NQC = token_mask(seen_NRR, layout.block_size, num_queries, num_keys)
    key_C = torch.arange(num_keys, device="cpu")
    return mask_NQC & (key_C <= key_C[num_keys - num_queries :, None])


def flex_block_mask(
    layout: BlockLayout, num_tokens: int, device: torch.device | str = "cpu"
) -> "BlockMask":
    """FlexAttention's mask of one sequence of `num_tokens` that sees itself.

    Blocks before a row's own are whole; only those on the diagonal are masked token by token.

    Raises:
        ValueError: the layout is for shorter sequences.
    """
    from torch.nn.attention.flex_attention import BlockMask

    check_length(num_tokens, layout.max_seqlen, "num_tokens")

    size, num_blocks = layout.block_size, -(-num_tokens // layout.block_size)
    seen_NRR = visible_blocks(layout.starts, layout.columns, num_blocks).to(device)
    whole_NRR = seen_NRR.tril(-1)
    numbers = [_ordered(part_NRR) for part_NRR in (seen_NRR & ~whole_NRR, whole_NRR)]

    def mask_mod(batch, head, query, key):
        return (key <= query) & seen_NRR[head, query // size, key // size]

    return BlockMask.from_kv_blocks(
        *numbers[0], *numbers[1], BLOCK_SIZE=(size, size), mask_mod=mask_mod,
        seq_lengths=(num_tokens, num_tokens),
    )  # fmt: skip


def _ordered(seen_NRR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each row sees [1, N, R], and which [1, N, R, R], those first; int32."""
    order_NRR = seen_NRR.int().argsort(dim=-1, descending=True, stable=True)
    return seen_NRR.sum(-1, dtype=torch.int32)[None], order_NRR.int()[None]
