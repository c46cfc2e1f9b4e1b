"""`take_tokens` as one kernel. S requests, T rows, R rows of tokens."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

ROWS = 256
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
        take_tokens_kernel[(triton.cdiv(num_reqs, ROWS),)](
            tensors["input_ids"],
            drawn_R,
            tensors["sources"],
            tensors["query_start_loc"],
            num_reqs,
            ROWS=ROWS,
        )
