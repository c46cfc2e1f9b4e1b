"""`attn_ops::advance_step`: the next decode step's inputs, as an operator of a compiled graph.

S requests, M blocks a request may own, B block size.
"""

import torch

from attn_ops.compat.clones_until_2_15 import apart_from
from attn_ops.metadata import advance_step as advance_in_place
from attn_ops.ops.library import operator

_PAGES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


@operator(mutates=("input_tokens", "positions", "seq_lens", "slot_mapping", *_PAGES))
def advance_step(
    sampled_token_ids: torch.Tensor,
    input_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int | torch.SymInt,
    *,
    active: torch.Tensor | None = None,
    paged_kv_indptr: torch.Tensor | None = None,
    paged_kv_indices: torch.Tensor | None = None,
    paged_kv_last_page_len: torch.Tensor | None = None,
) -> None:
    """`attn_ops.metadata.advance_step` as an operator, which a compiled step may hold.

    That function documents rule, capture, arguments and errors. Inductor may return a wrong copy of
    what two calls write (docs/troubleshooting.md).
    """
    pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
    written = (input_tokens, positions, seq_lens, slot_mapping, *pages)
    apart = apart_from([tensor for tensor in written if tensor is not None])
    advance_in_place(
        apart(sampled_token_ids), input_tokens, positions, seq_lens, slot_mapping,
        apart(block_table), int(block_size), active=active,
        **dict(zip(_PAGES, pages, strict=True)),
    )  # fmt: skip
