"""Fast prefill: layers that only read another layer's cache see the rows whose logits are wanted.

S requests, T rows, R rows whose logits are wanted (logits rows).
"""

from typing import Any

import numpy as np
import torch

from attn_ops.metadata.buffers import MetadataBuffers
from attn_ops.metadata.common import CommonAttentionMetadata

_LOGITS_TENSORS = ("logits_indices", "logits_indices_cpu", "logits_indices_padded")


def make_kv_sharing_fast_prefill_common_attn_metadata(
    common_attn_metadata: CommonAttentionMetadata, *, out: MetadataBuffers | None = None
) -> CommonAttentionMetadata:
    """The batch reduced to its logits rows: the same requests and keys, fewer queries.

    A batch of single-token queries is returned as it is. Where the host knows the logits rows
    (`logits_indices_cpu`, or a batch on the CPU) the result is exact. Else it is computed on the
    device, without reading it, and can be captured: query_start_loc is exact, its mirror None,
    max_query_len a bound (`max_logits_per_req`, or the smaller of max_query_len and the number of
    logits rows). `num_logits` on the device, where set, says how many rows count in a replay; the
    reduced batch keeps it: most of its requests may be padding.

    slot_mapping stays that of the whole batch; layers that share a cache write nothing.

    Args:
        common_attn_metadata: the batch, with logits_indices_padded and num_logits_indices.
        out: buffers whose query_start_loc is written.

    Raises:
        ValueError: the logits rows are missing, not rows of the batch or not as many as their
            mirror has, or `out` is the batch's own.
    """
    common = common_attn_metadata
    if common.max_query_len <= 1:
        return common
    padded, count = logits_rows_of(common)
    rows_cpu = _rows_on_host(common, padded, count)
    start = torch.empty_like(common.query_start_loc)
    if out is not None:
        out.check_room(common.num_reqs, 0, 0, common.device)
        out.check_apart(common.query_start_loc, padded)
        start = out.query_start_loc[: common.num_reqs + 1]
    if rows_cpu is not None and common.query_start_loc_cpu is not None:
        known = _reduced_on_host(rows_cpu, common)
        start.copy_(known["query_start_loc_cpu"], non_blocking=True)
    else:
        counts = count if common.num_logits is None else common.num_logits
        compute = reference_logits_rows
        if common.device.type == "cuda":
            from attn_ops.metadata.triton.logits_rows import launch_logits_rows as compute
        compute(common.query_start_loc, padded, counts, start)
        known = dict.fromkeys(("query_start_loc_cpu", "num_computed_tokens_cpu"))
        most = (common.max_logits_per_req, common.max_query_len, count)
        known |= {"max_query_len": min(n for n in most if n is not None)}
    dropped = dict.fromkeys(("positions", "num_logits_indices", *_LOGITS_TENSORS))
    return common.replace(
        query_start_loc=start, num_actual_tokens=count, causal=True, **known, **dropped
    )


def with_known_logits_rows(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch with what a reduction needs; `logits_indices` stands in for the padded ones.

    Raises:
        ValueError: the rows are missing, unknown on the host without `num_logits`, or not the last
            rows of their requests.
    """
    common = _with_padded(common)
    padded, count = logits_rows_of(common)
    if common.num_logits is None and _rows_on_host(common, padded, count) is None:
        raise ValueError(
            "logits_indices_cpu must be given for fast prefill on "
            f"{common.device.type}, got None: the host checks that they are the last rows"
        )
    check_last_rows(common, padded, count)
    return common


def _with_padded(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch; `logits_indices` stands in for the padded ones, where those are not given."""
    rows = common.logits_indices
    if common.logits_indices_padded is not None or rows is None:
        return common
    return common.replace(logits_indices_padded=rows, num_logits_indices=rows.shape[0])


def all_rows_are_logits_rows(common: CommonAttentionMetadata) -> bool:
    """Whether nothing is to be reduced: queries of one token, or logits rows of all.

    Raises:
        ValueError: the host sees that the rows are not those of the batch, in their order.
    """
    common, decodes = _with_padded(common), common.max_query_len <= 1
    padded, count = common.logits_indices_padded, common.num_logits_indices
    if not decodes and (common.num_logits is not None or count != common.num_actual_tokens):
        return False
    rows = None if padded is None or count is None else _rows_on_host(common, padded, count)
    if padded is not None and count == 0 and padded.shape[0] == common.num_actual_tokens:
        return True  # all of it is padding
    if rows is not None and not np.array_equal(rows, np.arange(common.num_actual_tokens)):
        raise ValueError(
            f"logits_indices_cpu must be the {common.num_actual_tokens} rows of the batch in their "
            f"order, where all of them are wanted or queries have one token, got {rows.tolist()}"
        )
    return True


def logits_rows_of(common: CommonAttentionMetadata) -> tuple[torch.Tensor, int]:
    """The padded logits rows and how many of them count.

    Raises:
        ValueError: one of them is missing, or the count is out of range.
    """
    padded, count = common.logits_indices_padded, common.num_logits_indices
    if padded is None or count is None:
        raise ValueError(
            "logits_indices_padded and num_logits_indices must be given for fast prefill, "
            f"got {type(padded).__name__} and {count}"
        )
    if not 0 <= count <= padded.shape[0]:
        raise ValueError(
            f"num_logits_indices must be from 0 to {padded.shape[0]}, the length of "
            f"logits_indices_padded, got {count}"
        )
    return padded, count


def _rows_on_host(
    common: CommonAttentionMetadata, padded: torch.Tensor, count: int
) -> np.ndarray | None:
    """The logits rows, if the host knows them and no replay will change their number."""
    if common.num_logits is not None:
        return None
    rows = common.logits_indices_cpu
    if rows is None:
        return padded[:count].numpy() if padded.is_cpu else None
    if rows.shape[0] != count:
        raise ValueError(
            f"logits_indices_cpu must have num_logits_indices={count} entries, got {rows.shape[0]}"
        )
    return rows.numpy()


def _reduced_on_host(rows: np.ndarray, common: CommonAttentionMetadata) -> dict[str, Any]:
    """What the host knows of the reduced batch."""
    assert common.query_start_loc_cpu is not None, "checked by the caller"
    query = _rows_per_request(rows, common.query_start_loc_cpu.numpy())
    start = np.zeros(query.size + 1, dtype=np.int32)
    np.cumsum(query, out=start[1:])
    computed = None
    if common.seq_lens_cpu is not None:
        computed = (common.seq_lens_cpu - torch.from_numpy(query)).clamp(min=0)
    return {
        "query_start_loc_cpu": torch.from_numpy(start),
        "num_computed_tokens_cpu": computed,
        "max_query_len": int(query.max(initial=0)),
    }


def _rows_per_request(rows: np.ndarray, start: np.ndarray) -> np.ndarray:
    """[S] int32: logits rows of each request."""
    outside = (rows < 0) | (rows >= start[-1])
    if outside.any():
        bad = int(outside.argmax())
        raise ValueError(
            f"logits_indices_padded must hold rows from 0 to {start[-1] - 1}, "
            f"got logits_indices_padded[{bad}]={rows[bad]}"
        )
    request = np.searchsorted(start[1:], rows, side="right")
    return np.bincount(request, minlength=start.size - 1).astype(np.int32)


def reference_logits_rows(
    query_start_loc: torch.Tensor,
    logits_indices: torch.Tensor,
    num_logits: torch.Tensor | int,
    new_start: torch.Tensor,
) -> None:
    """The same by torch on the device; rows out of the batch count for no request."""
    entry_R = torch.arange(logits_indices.shape[0], dtype=torch.int32, device=new_start.device)
    wanted_R = (entry_R < num_logits) & (logits_indices >= 0)
    before_SR = wanted_R & (logits_indices < query_start_loc[:, None])
    torch.sum(before_SR, 1, dtype=new_start.dtype, out=new_start)


def check_last_rows(common: CommonAttentionMetadata, padded: torch.Tensor, count: int) -> None:
    """Raise a ValueError if the host sees that the rows are not the last of their requests."""
    rows = _rows_on_host(common, padded, count)
    if rows is None or common.query_start_loc_cpu is None or common.max_query_len <= 1:
        return
    start = common.query_start_loc_cpu.numpy()
    count_S = _rows_per_request(rows, start)
    last_rows = np.repeat(start[1:] - np.cumsum(count_S), count_S) + np.arange(count)
    if (rows != last_rows).any():
        bad = int((rows != last_rows).argmax())
        raise ValueError(
            "logits_indices_padded must hold the last rows of each request, in order, "
            f"got logits_indices_padded[{bad}]={rows[bad]} for row {last_rows[bad]}"
        )
