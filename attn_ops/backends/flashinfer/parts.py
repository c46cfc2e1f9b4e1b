"""Which requests of a batch each of FlashInfer's wrappers takes, and the arrays that it wants.

Requests without tokens in the cache are the padding of a batch. No kernel sees them: what an empty
request gives differs between FlashInfer's kernels, and their rows are zero whatever it is. In a
captured batch, whose requests are a fixed number, they stand as requests without pages, whose rows
the FA2 kernels write as zeros (`captured`).

S requests, L requests with tokens, T rows, B block size.
"""

import dataclasses

import numpy as np
import torch

from attn_ops.metadata import CommonAttentionMetadata, split_decodes_and_prefills


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """L requests that one wrapper takes.

    Tensors are int32, on the CPU, and in pageable memory of their own: FlashInfer copies them
    without waiting, and from a pinned mirror it would read what the next step writes there.
    """

    query_start_loc: torch.Tensor  # [L+1] first row of each request, from 0
    page_start_loc: torch.Tensor  # [L+1] first page of each request, from 0
    last_page_len: torch.Tensor  # [L] tokens in the last page, 1 to B; of no use without pages
    seq_lens: torch.Tensor  # [L] tokens in the cache
    rows: slice  # of the rows that requests with tokens have
    pages: slice  # of `page_indices`


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """A batch as its decodes and its prefills; a part without rows is None."""

    decodes: Part | None
    prefills: Part | None
    num_rows: int  # rows of requests with tokens
    num_pages: int  # pages of all requests
    row_indices: np.ndarray | None  # [num_rows] int64: those rows; None: they are the first ones


def divide(common: CommonAttentionMetadata, block_size: int) -> Division:
    """Divide a batch by its CPU mirrors.

    Decodes are the single-token queries in front; in a batch of another order they count as
    prefills.

    Raises:
        ValueError: a mirror is not there.
    """
    start, seq_len = (_mirror(common, name) for name in ("query_start_loc_cpu", "seq_lens_cpu"))
    query, live = np.diff(start), seq_len > 0
    boundary = _boundary(common, query, live)
    ids = np.flatnonzero(live)
    row_ends = np.cumsum(query[ids])
    page_ends = np.cumsum(-(-seq_len[ids] // block_size))
    num_rows = int(row_ends[-1]) if ids.size else 0
    first = int(np.searchsorted(ids, boundary))

    def part(begin: int, end: int) -> Part | None:
        return _part(seq_len[ids], row_ends, page_ends, block_size, begin, end)

    in_front = not ids.size or int(start[ids[-1] + 1]) == num_rows
    return Division(
        decodes=part(0, first),
        prefills=part(first, ids.size),
        num_rows=num_rows,
        num_pages=int(page_ends[-1]) if ids.size else 0,
        row_indices=None if in_front else np.flatnonzero(np.repeat(live, query)),
    )


def divide_captured(common: CommonAttentionMetadata, block_size: int) -> Part:
    """A decode batch as one part of all its requests; those that are padding have no pages.

    Raises:
        ValueError: a mirror is not there, a request with tokens has another number of query rows
            than one, or more tokens than its row of the block table has room for.
    """
    start, seq_len = (_mirror(common, name) for name in ("query_start_loc_cpu", "seq_lens_cpu"))
    live, row = np.flatnonzero(seq_len > 0), np.arange(seq_len.size)
    if (start[live] != live).any() or (start[live + 1] != live + 1).any():
        raise ValueError(
            "common must have one query row a request to be captured, "
            f"got query_start_loc {start.tolist()}; supported: decode batches"
        )
    room = common.block_table_tensor.shape[1] * block_size
    if seq_len.max(initial=0) > room:
        raise ValueError(f"seq_lens must be at most {room}, got {seq_len.max()}")
    page_ends = np.cumsum(-(-seq_len // block_size))
    part = _part(seq_len, row + 1, page_ends, block_size, 0, row.size)
    if part is None:
        raise ValueError("common must have a request to be captured, got none")
    return part


def page_indices(common: CommonAttentionMetadata, num_pages: int, block_size: int) -> torch.Tensor:
    """[num_pages] int32, device: physical blocks of all requests, one request behind another.

    One kernel reads lengths and tables on the device: an index made on the host would be an upload
    of a word a page, and the driver waits for uploads of more than 64 KiB of pageable memory.

    Args:
        common: the batch.
        num_pages: of all requests; those without tokens have none.
        block_size: tokens a block holds.
    """
    from attn_ops.metadata.triton.pages import launch_page_indices

    return launch_page_indices(common.seq_lens, common.block_table_tensor, num_pages, block_size)


def _mirror(common: CommonAttentionMetadata, name: str) -> np.ndarray:
    mirror = getattr(common, name)
    if mirror is None:
        raise ValueError(f"{name} must be given, got None; FLASHINFER plans on the host")
    return mirror.numpy()


def _boundary(common: CommonAttentionMetadata, query: np.ndarray, live: np.ndarray) -> int:
    """Requests before it have one query token or no tokens at all.

    `split_decodes_and_prefills` counts queries of no token as decodes; the decode wrapper has a row
    for every request, so the first one with cached tokens but no query ends the decodes.
    """
    num_decodes = split_decodes_and_prefills(common)[0]
    other = np.flatnonzero(live[:num_decodes] & (query[:num_decodes] != 1))
    return int(other[0]) if other.size else num_decodes


def _part(
    seq_len: np.ndarray,
    row_ends: np.ndarray,
    page_ends: np.ndarray,
    block_size: int,
    begin: int,
    end: int,
) -> Part | None:
    """Requests [begin, end) of those with tokens; None if they have no rows."""
    rows, pages = _span(row_ends, begin, end), _span(page_ends, begin, end)
    if rows.start == rows.stop:
        return None
    return Part(
        query_start_loc=_start_loc(row_ends[begin:end], rows.start),
        page_start_loc=_start_loc(page_ends[begin:end], pages.start),
        last_page_len=_int32((seq_len[begin:end] - 1) % block_size + 1),
        seq_lens=_int32(seq_len[begin:end]),
        rows=rows,
        pages=pages,
    )


def _span(ends: np.ndarray, begin: int, end: int) -> slice:
    """What the items [begin, end) cover, when item i ends at ends[i]."""
    return slice(*(int(ends[i - 1]) if i else 0 for i in (begin, end)))


def _start_loc(ends: np.ndarray, first: int) -> torch.Tensor:
    return _int32(np.concatenate(([0], ends - first)))


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
