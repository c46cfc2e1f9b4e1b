"""`attn_ops::advance_step`: the next decode step's inputs, as an operator of a compiled graph.

S requests, M blocks a request may own, B block size.
"""

import torch

from attn_ops.compat.clones_until_2_15 import apart_from
from attn_ops.metadata import advance_step as advance_in_place
from attn_ops.ops.library import LIBRARY, implements

LIBRARY.define(
    "advance_step(Tensor sampled_token_ids, Tensor(a!) input_tokens, Tensor(b!) positions, "
    "Tensor(c!) seq_lens, Tensor(d!) slot_mapping, Tensor block_table, SymInt block_size, *, "
    "Tensor? active=None, Tensor(e!)? paged_kv_indptr=None, Tensor(f!)? paged_kv_indices=None, "
    "Tensor(g!)? paged_kv_last_page_len=None) -> ()"
)


@implements("advance_step")
def _advance_step(
    sampled_token_ids: torch.Tensor,
    input_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    **optional: torch.Tensor | None,
) -> None:
    written = [input_tokens, positions, seq_lens, slot_mapping]
    written += [
        tensor for name, tensor in optional.items() if name != "active" and tensor is not None
    ]
    apart = apart_from(written)
    advance_in_place(
        apart(sampled_token_ids),
        input_tokens,
        positions,
        seq_lens,
        slot_mapping,
        apart(block_table),
        block_size,
        **optional,
    )


@torch.library.register_fake("attn_ops::advance_step", lib=LIBRARY)
def _advance_step_fake(
    sampled_token_ids: torch.Tensor,
    input_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    **optional: torch.Tensor | None,
) -> None:
    return None


def advance_step(
    sampled_token_ids: torch.Tensor,
    input_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    active: torch.Tensor | None = None,
    paged_kv_indptr: torch.Tensor | None = None,
    paged_kv_indices: torch.Tensor | None = None,
    paged_kv_last_page_len: torch.Tensor | None = None,
) -> None:
    """`attn_ops.metadata.advance_step` as an operator, which a compiled step may hold.

    Rule, capture, shapes and errors are that function's; what it writes is in the schema. Inductor
    may return a wrong copy of what two calls write (docs/troubleshooting.md).

    Args:
        sampled_token_ids: [S] int32 or int64; read.
        input_tokens: [S] int32 or int64; mutated.
        positions: [S] int64; mutated.
        seq_lens: [S] int32; mutated.
        slot_mapping: [S] int64; mutated.
        block_table: [S, M] int32; read.
        block_size: B.
        active: [S] bool; None: all are.
        paged_kv_indptr: [S+1] int32 or None; mutated.
        paged_kv_indices: [any] int32 or None; mutated. Needs paged_kv_indptr.
        paged_kv_last_page_len: [S] int32 or None; mutated. Needs paged_kv_indptr.

    Raises:
        ValueError: dtypes, shapes or devices do not fit, or tensors that are written share memory;
            nothing is written.
    """
    torch.ops.attn_ops.advance_step(
        sampled_token_ids,
        input_tokens,
        positions,
        seq_lens,
        slot_mapping,
        block_table,
        block_size,
        active=active,
        paged_kv_indptr=paged_kv_indptr,
        paged_kv_indices=paged_kv_indices,
        paged_kv_last_page_len=paged_kv_last_page_len,
    )
