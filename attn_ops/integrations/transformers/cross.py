"""The batch of a decoder's cross-attention: its rows against the cached rows of an encoder.

S requests, T rows of the decoder, E rows of the encoder, M blocks a request may own.
"""

from collections.abc import Sequence

import torch

from attn_ops.metadata import (
    PAD_SLOT_ID,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


def cross_metadata(
    builder: AttentionMetadataBuilder[AttentionMetadata],
    query_lens: Sequence[int],
    encoder_lens: Sequence[int],
    block_table: torch.Tensor,
    *,
    write: bool,
) -> AttentionMetadata:
    """A step of cross-attention, for the keyword `cross_attn_metadata`.

    Args:
        builder: of `cross_attention_specs`.
        query_lens: rows of each request in this step of the decoder.
        encoder_lens: rows of each request's encoder output, at least 1.
        block_table: [S, M] int32, of the cache that holds the encoder's keys and values.
        write: whether the model is given the encoder's output, [1, E, hidden], in this step, which
            is written to the cache. Otherwise the model is given one row of any values,
            [1, 1, hidden], which goes to the null block.

    Returns:
        Metadata whose `common.slot_mapping` is [E] or [1]: the keyword `cross_slot_mapping`.

    Raises:
        ValueError: lengths and table do not fit each other, or an encoder output is empty.
    """
    if len(query_lens) != len(encoder_lens) or min([1, *encoder_lens]) < 1:
        raise ValueError(
            "encoder_lens must be at least 1 for each of the "
            f"{len(query_lens)} requests, got {list(encoder_lens)}"
        )
    size, device = builder.block_size, builder.device
    keys = CommonAttentionMetadata.from_lengths(
        encoder_lens, encoder_lens, block_table, size, device
    )
    # Another table: the decoder may have more rows than the encoder.
    blocks = torch.zeros(
        len(query_lens), -(-max([1, *query_lens]) // size), dtype=torch.int32, device="cpu"
    )
    rows = CommonAttentionMetadata.from_lengths(query_lens, query_lens, blocks, size, device)
    slots = keys.slot_mapping if write else torch.full((1,), PAD_SLOT_ID, device=device)
    common = rows.replace(
        seq_lens=keys.seq_lens,
        seq_lens_cpu=keys.seq_lens_cpu,
        num_computed_tokens_cpu=None,
        max_seq_len=keys.max_seq_len,
        block_table_tensor=keys.block_table_tensor,
        slot_mapping=slots,
        positions=None,
        causal=False,
    )
    return builder.build(0, common)
