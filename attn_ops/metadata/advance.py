"""`advance_step`: a decode batch one token forward, on the device, without the host.

S requests, M blocks a request may own, B block size.
"""

import torch

from attn_ops.metadata.positions import PAD_SLOT_ID
from attn_ops.metadata.validation import check_apart, check_int, check_tensor

_TOKENS = (torch.int64, torch.int32)


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
    """Make the tokens just sampled the next step's inputs, in place and capturable.

    One kernel, and a second one for FlashInfer's arrays.

    A request advances unless it is padding (seq_len 0), not active, or has no room left in its
    blocks (seq_len >= M * B). What does not advance keeps all its values but its slot, which
    becomes PAD_SLOT_ID: its next KV write goes to the null block.

    Args:
        sampled_token_ids: [S] int32 or int64; read.
        input_tokens: [S] int32 or int64; becomes the sampled token.
        positions: [S] int64; becomes the old seq_len.
        seq_lens: [S] int32; grows by one.
        slot_mapping: [S] int64; becomes the slot of the new position.
        block_table: [S, M] int32; read. The next token's block must be in it already.
        block_size: B.
        active: [S] bool; None: all are.
        paged_kv_indptr: [S+1] int32; becomes FlashInfer's page offsets for the new seq_lens.
        paged_kv_indices: [any] int32; becomes FlashInfer's page list; entries behind the last page
            stay, and what does not fit is not written: give it S * M entries, or as many as the
            cache has blocks. Needs paged_kv_indptr.
        paged_kv_last_page_len: [S] int32; tokens of the last page, 0 for padding. Needs
            paged_kv_indptr.

    Raises:
        ValueError: dtypes, shapes or devices do not fit, or tensors that are written share memory;
            nothing is written.
    """
    check_int("block_size", block_size, 1)
    written = {
        "input_tokens": input_tokens,
        "positions": positions,
        "seq_lens": seq_lens,
        "slot_mapping": slot_mapping,
        "paged_kv_indptr": paged_kv_indptr,
        "paged_kv_indices": paged_kv_indices,
        "paged_kv_last_page_len": paged_kv_last_page_len,
    }
    read = {"sampled_token_ids": sampled_token_ids, "block_table": block_table, "active": active}
    _check_step({**read, **written}, seq_lens.shape[0], seq_lens.device)
    check_apart(**written)
    advance = reference_advance_step
    if seq_lens.device.type == "cuda":
        from attn_ops.metadata.triton.step import launch_advance_step as advance
    advance(**read, **written, block_size=block_size)


def _check_step(
    tensors: dict[str, torch.Tensor | None], num_reqs: int, device: torch.device
) -> None:
    """Raise a ValueError that names the first argument that does not fit."""
    for name, dtypes, shape in (
        ("sampled_token_ids", _TOKENS, (num_reqs,)),
        ("input_tokens", _TOKENS, (num_reqs,)),
        ("positions", (torch.int64,), (num_reqs,)),
        ("seq_lens", (torch.int32,), (num_reqs,)),
        ("slot_mapping", (torch.int64,), (num_reqs,)),
        ("block_table", (torch.int32,), (num_reqs, None)),
        ("active", (torch.bool,), (num_reqs,)),
        ("paged_kv_indptr", (torch.int32,), (num_reqs + 1,)),
        ("paged_kv_indices", (torch.int32,), (None,)),
        ("paged_kv_last_page_len", (torch.int32,), (num_reqs,)),
    ):
        tensor = tensors[name]
        if tensor is not None:
            check_tensor(name, tensor, dtypes, shape, device)
    of_pages = (tensors["paged_kv_indices"], tensors["paged_kv_last_page_len"])
    if tensors["paged_kv_indptr"] is None and any(t is not None for t in of_pages):
        raise ValueError(
            "paged_kv_indptr must be given with paged_kv_indices and paged_kv_last_page_len, "
            "got None"
        )


def reference_advance_step(
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
    """`advance_step` in plain PyTorch."""
    max_blocks = block_table.shape[1]
    index_S = seq_lens.div(block_size, rounding_mode="floor").long()
    advances_S = (seq_lens > 0) & (index_S < max_blocks)
    if active is not None:
        advances_S = advances_S & active
    if max_blocks:
        block_S = block_table.gather(1, index_S.clamp(0, max_blocks - 1).unsqueeze(1)).squeeze(1)
        slot_S = block_S.long() * block_size + seq_lens % block_size
        slot_mapping.copy_(torch.where(advances_S, slot_S, PAD_SLOT_ID))
    else:
        slot_mapping.fill_(PAD_SLOT_ID)
    input_tokens.copy_(torch.where(advances_S, sampled_token_ids.to(input_tokens), input_tokens))
    positions.copy_(torch.where(advances_S, seq_lens.long(), positions))
    seq_lens.add_(advances_S.int())
    if paged_kv_indptr is not None:
        _page_lists(
            seq_lens,
            block_table,
            block_size,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
        )


def _page_lists(
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    indptr: torch.Tensor,
    indices: torch.Tensor | None,
    last_page_len: torch.Tensor | None,
) -> None:
    """FlashInfer's description of the same batch, from seq_lens and the block table."""
    pages_S = (seq_lens + block_size - 1).div(block_size, rounding_mode="floor")
    indptr[0] = 0
    indptr[1:] = pages_S.cumsum(0)
    if last_page_len is not None:
        last_page_len.copy_(seq_lens - (pages_S - 1).clamp(min=0) * block_size)
    if indices is not None:
        page_M = torch.arange(block_table.shape[1], device=seq_lens.device)
        target_SM = indptr[:-1, None] + page_M
        written_SM = (page_M < pages_S[:, None]) & (target_SM < indices.shape[0])
        indices[target_SM[written_SM]] = block_table[written_SM]
