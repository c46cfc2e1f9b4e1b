"""Queries of a uniform batch (speculative decoding) as kernels for decodes take them, and back.

T rows, S requests, Q query tokens of each request, N query heads, H head size.
"""

import torch


def reshape_query_for_spec_decode(query: torch.Tensor, batch_size: int) -> torch.Tensor:
    """[T, N, H] -> [S, Q, N, H] with S = `batch_size`: a view.

    An empty batch of no requests gives [0, 0, N, H].

    Raises:
        ValueError: query has another rank, or its rows do not divide by `batch_size`.
    """
    if query.dim() != 3:
        raise ValueError(
            f"query must have shape [num_tokens, num_heads, head_size], got {list(query.shape)}"
        )
    num_tokens = query.shape[0]
    if batch_size < 0 or (num_tokens % batch_size if batch_size else num_tokens):
        raise ValueError(f"batch_size must divide the {num_tokens} rows of query, got {batch_size}")
    query_len = num_tokens // batch_size if batch_size else 0
    return query.view(batch_size, query_len, *query.shape[1:])


def reshape_attn_output_for_spec_decode(attn_output: torch.Tensor) -> torch.Tensor:
    """[S, Q, N, H] -> [T, N, H]; a 3-D output is returned as it is. A view where strides allow.

    Raises:
        ValueError: attn_output has another rank.
    """
    if attn_output.dim() == 3:
        return attn_output
    if attn_output.dim() != 4:
        raise ValueError(
            "attn_output must have shape [batch_size, query_len, num_heads, head_size], "
            f"got {list(attn_output.shape)}"
        )
    return attn_output.flatten(0, 1)
