"""Chunked local attention as plain attention over virtual batches (Llama 4).

A token at position p sees the keys of its chunk up to its own: p // C * C to p. So every run of a
request's query tokens within one chunk is a request of its own, whose keys are that chunk's, and
whose blocks are a part of the request's: a virtual batch.

S requests, V virtual batches, T rows, C chunk size, B block size, M blocks a request may own.
"""

import dataclasses

import numpy as np
import torch

from attn_ops.metadata.buffers import MetadataBuffers
from attn_ops.metadata.common import CommonAttentionMetadata
from attn_ops.metadata.validation import check_int

MAX_CHUNK = 2**30
"""Positions are int32, and one past the last chunk must fit."""


def max_local_attention_virtual_batches(
    attn_chunk_size: int, num_reqs: int, num_tokens: int, max_query_len: int | None = None
) -> int:
    """A bound on the virtual batches that a batch of these sizes can have.

    A query of q tokens touches at most 1 + ceil((q - 1) / C) chunks, and every request, even one
    without query tokens, gives one. Exact for decodes.

    Args:
        attn_chunk_size: C.
        num_reqs: S, padding requests included.
        num_tokens: query tokens in all, or a bound.
        max_query_len: longest query, or a bound; None: not known.

    Raises:
        ValueError: a size is negative, or the chunk is not at least 1.
    """
    check_int("attn_chunk_size", attn_chunk_size, 1)
    check_int("num_reqs", num_reqs, 0)
    check_int("num_tokens", num_tokens, 0)
    bounds = [num_reqs + num_tokens]
    if attn_chunk_size > 1:
        extra = (num_tokens + num_reqs * (attn_chunk_size - 2)) // attn_chunk_size
        bounds.append(num_reqs + extra)
    if max_query_len is not None:
        bounds.append(num_reqs * (1 - (1 - max(max_query_len, 1)) // attn_chunk_size))
    return min(bounds)


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    common_attn_metadata: CommonAttentionMetadata,
    block_size: int = 0,
    *,
    on_device: bool = False,
    max_virtual_batches: int | None = None,
    out: MetadataBuffers | None = None,
) -> CommonAttentionMetadata:
    """The batch's virtual batches, as a batch; rows and slots are those of the batch.

    Where layers with a window have blocks of their own, so have layers that attend in chunks.

    Args:
        attn_chunk_size: C, a multiple of the block size.
        common_attn_metadata: the batch; its CPU mirrors are read, unless `on_device`.
        block_size: B; 0 takes the batch's own.
        on_device: use device arithmetic only, so that the call can be captured. The number of
            virtual batches is then a bound: those that are too many stand last, with no query, no
            keys and null blocks. Mirrors of the result are None. Its max_query_len must bound
            that of every replay.
        max_virtual_batches: that bound, at least `max_local_attention_virtual_batches` of the
            batch's sizes, which None takes.
        out: buffers that query_start_loc, seq_lens and the block table are written to.

    Returns:
        V virtual batches; block_table_tensor is [V, C // B]. Entries behind a request's table
        repeat its last one. Requests without query tokens give one virtual batch without, and
        padding requests (rows but no cached tokens) one without keys.

    Raises:
        ValueError: the chunk is not a multiple of the block size, mirrors are needed and not there,
            the bound or `out` is too small, or `out` holds the batch itself. Nothing is written.
    """
    common, chunk = common_attn_metadata.of_windows(), attn_chunk_size
    block_size = block_size or common.block_size or 0
    _check_chunk(chunk, block_size)
    if on_device:
        count = _bound(chunk, common, max_virtual_batches)
        mirrors = _Mirrors(longest=(common.max_query_len, common.max_seq_len))
    elif max_virtual_batches is not None:
        raise ValueError(
            f"max_virtual_batches must be None unless on_device, got {max_virtual_batches}"
        )
    else:
        mirrors, count = _on_host(chunk, common)
    start, seq_lens, table = _filled(chunk, block_size, count, common, out)
    return CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=mirrors.query_start_loc,
        seq_lens=seq_lens,
        seq_lens_cpu=mirrors.seq_lens,
        num_computed_tokens_cpu=mirrors.num_computed_tokens,
        num_reqs=count,
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=min(mirrors.longest[0], chunk),
        max_seq_len=min(mirrors.longest[1], chunk),
        block_table_tensor=table,
        slot_mapping=common.slot_mapping,
        causal=True,
        positions=common.positions,
        block_size=block_size,
    )


@dataclasses.dataclass(frozen=True)
class _Mirrors:
    """What the host knows of V virtual batches."""

    longest: tuple[int, int]  # query and keys, or bounds
    query_start_loc: torch.Tensor | None = None  # [V+1] int32
    seq_lens: torch.Tensor | None = None  # [V] int32
    num_computed_tokens: torch.Tensor | None = None  # [V] int32


def _check_chunk(chunk: int, block_size: int) -> None:
    check_int("block_size", block_size, 1)
    check_int("attn_chunk_size", chunk, 1)
    if chunk % block_size or chunk > MAX_CHUNK:
        raise ValueError(
            f"attn_chunk_size must be a multiple of block_size and at most {MAX_CHUNK}, "
            f"got {chunk} and {block_size}"
        )


def _bound(chunk: int, common: CommonAttentionMetadata, wanted: int | None) -> int:
    """The number of virtual batches on the device: enough for every batch of these sizes."""
    rows = common.slot_mapping.shape[0]
    least = max_local_attention_virtual_batches(chunk, common.num_reqs, rows, common.max_query_len)
    if wanted is None:
        return least
    check_int("max_virtual_batches", wanted, least)
    return wanted


def _filled(
    chunk: int,
    block_size: int,
    count: int,
    common: CommonAttentionMetadata,
    out: MetadataBuffers | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query_start_loc, seq_lens and block table of `count` virtual batches, on the device."""
    pages = chunk // block_size
    if out is None:
        out = MetadataBuffers.allocate(count, 0, pages, common.device)
    out.check_room(count, 0, pages, common.device)
    batch = (common.query_start_loc, common.seq_lens, common.block_table_tensor)
    out.check_apart(*batch)
    start, seq_lens = out.query_start_loc[: count + 1], out.seq_lens[:count]
    local = (start, seq_lens, out.block_table[:count, :pages])
    fill = reference_virtual_batches
    if common.device.type == "cuda":
        from attn_ops.metadata.triton.virtual_batches import launch_virtual_batches as fill
    fill(chunk, block_size, *batch, *local)
    return local


def _on_host(chunk: int, common: CommonAttentionMetadata) -> tuple[_Mirrors, int]:
    """The virtual batches that the batch's mirrors have, by NumPy, and their number."""
    if common.query_start_loc_cpu is None or common.seq_lens_cpu is None:
        raise ValueError(
            "query_start_loc_cpu and seq_lens_cpu must be given, got None; supported without: "
            "on_device=True"
        )
    start, seq = common.query_start_loc_cpu.numpy(), common.seq_lens_cpu.numpy()
    computed = np.maximum(seq - np.diff(start), 0)
    last = np.maximum(seq - 1, 0) // chunk
    first = np.minimum(computed // chunk, last)
    count = last - first + 1
    request = np.repeat(np.arange(seq.size), count)
    number = np.arange(request.size) - np.repeat(np.cumsum(count) - count, count) + first[request]
    key_begin = number * chunk
    key_end = np.minimum(key_begin + chunk, seq[request])
    local_start = np.empty(request.size + 1, dtype=np.int32)
    local_start[:-1] = (start[:-1] - computed)[request] + np.maximum(computed[request], key_begin)
    local_start[-1] = start[-1]
    keys = (key_end - key_begin).astype(np.int32)
    query = np.diff(local_start)
    mirrors = _Mirrors(
        longest=(int(query.max(initial=0)), int(keys.max(initial=0))),
        query_start_loc=torch.from_numpy(local_start),
        seq_lens=torch.from_numpy(keys),
        num_computed_tokens=torch.from_numpy(np.maximum(keys - query, 0)),
    )
    return mirrors, request.size


def reference_virtual_batches(
    chunk: int,
    block_size: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    local_start: torch.Tensor,
    local_seq_lens: torch.Tensor,
    local_table: torch.Tensor,
) -> None:
    """Fill the last three tensors, of fixed sizes, without reading the others on the host."""
    (num_reqs, max_blocks), end = block_table.shape, query_start_loc[-1:]
    local_start[-1:].copy_(end)
    if num_reqs == 0 or local_seq_lens.shape[0] == 0:
        local_start.copy_(end.expand_as(local_start))
        local_seq_lens.zero_()
        local_table.zero_()
        return
    computed = (seq_lens - (query_start_loc[1:] - query_start_loc[:-1])).clamp(min=0)
    last = (seq_lens - 1).clamp(min=0).div(chunk, rounding_mode="floor")
    first = torch.minimum(computed.div(chunk, rounding_mode="floor"), last)
    ends = (last - first + 1).cumsum(0, dtype=torch.int32)
    virtual = torch.arange(local_seq_lens.shape[0], dtype=torch.int32, device=seq_lens.device)
    request = torch.searchsorted(ends, virtual, right=True)
    real = request < num_reqs
    request = request.clamp(max=num_reqs - 1)
    # Counted from the request's last chunk, which is the one before ends[request].
    key_begin = (last[request] - (ends[request] - 1 - virtual)) * chunk
    keys = torch.minimum(key_begin + chunk, seq_lens[request]) - key_begin
    query_begin = torch.maximum(computed[request], key_begin) - computed[request]
    local_start[:-1].copy_(torch.where(real, query_start_loc[request] + query_begin, end))
    local_seq_lens.copy_(torch.where(real, keys, 0))
    if max_blocks == 0:
        local_table.zero_()
        return
    page = torch.arange(local_table.shape[1], dtype=torch.int32, device=seq_lens.device)
    column = key_begin.div(block_size, rounding_mode="floor")[:, None] + page
    table = block_table[request[:, None], column.clamp(0, max_blocks - 1)]
    local_table.copy_(torch.where(real[:, None], table, 0))
