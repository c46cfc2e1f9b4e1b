"""A batch cut into smaller batches (micro-batches), anywhere: a request may be cut in two.

S requests, T rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from attn_ops.metadata.common import CommonAttentionMetadata


@dataclasses.dataclass
class UBatchSlice:
    """Requests and rows of one micro-batch: slices with start and stop, without a step."""

    request_slice: slice
    token_slice: slice

    def is_empty(self) -> bool:
        return any(s.start == s.stop for s in (self.request_slice, self.token_slice))

    @property
    def num_tokens(self) -> int:
        return self.token_slice.stop - self.token_slice.start


def slice_query_start_locs(query_start_loc: torch.Tensor, request_slice: slice) -> torch.Tensor:
    """[requests of the slice + 1]: query_start_loc of some requests, from 0. A new tensor.

    Raises:
        ValueError: the slice has no int start and stop, a step, or leaves the batch.
    """
    _check_part("request_slice", request_slice, query_start_loc.shape[0] - 1, least=0)
    start, stop = request_slice.start, request_slice.stop
    return query_start_loc[start : stop + 1] - query_start_loc[start]


def split_attn_metadata(
    ubatch_slices: Sequence[UBatchSlice], common_attn_metadata: CommonAttentionMetadata
) -> list[CommonAttentionMetadata]:
    """One batch per slice; `common_attn_metadata` is not changed. Errors as for one slice."""
    return [_make_metadata_with_slice(s, common_attn_metadata) for s in ubatch_slices]


def _make_metadata_with_slice(
    ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata
) -> CommonAttentionMetadata:
    """The batch that `ubatch_slice` cuts out, on the device without reading it.

    Of a request cut in two, the first part ends where the slice does (its seq_len is shorter by the
    tokens left out) and the second part counts the tokens before it as computed. Query offsets are
    new tensors; the rest are views, and seq_lens a copy where the last request is cut. A slice that
    holds the last request may run on into padding rows. Logits indices are kept where the host
    knows them; dcp_local_seq_lens is kept unless the last request is cut.

    Raises:
        ValueError: the slice is empty, out of the batch, or its rows are not those of its requests.
    """
    start_cpu = attn_metadata.query_start_loc_cpu
    if start_cpu is None:
        raise ValueError("query_start_loc_cpu must be given to cut a batch, got None")
    requests, tokens = ubatch_slice.request_slice, ubatch_slice.token_slice
    _check_slices(ubatch_slice, attn_metadata, start_cpu.numpy())
    total = int(start_cpu[requests.stop])
    begin, end = tokens.start, min(tokens.stop, total)
    cut = total - end  # tokens of the last request that the next slice has
    starts = slice(requests.start, requests.stop + 1)
    new_start_cpu = start_cpu[starts].clamp(begin, end) - begin
    query = np.diff(new_start_cpu.numpy())
    seq_cpu = _shortened(attn_metadata.seq_lens_cpu, requests, cut)
    computed = attn_metadata.num_computed_tokens_cpu
    if computed is not None:
        computed = computed[requests].clone()
        computed[0] += begin - int(start_cpu[requests.start])
    if computed is not None and seq_cpu is not None:
        computed = torch.minimum(computed, seq_cpu)  # 0 for padding, whose rows hold no tokens
    changes = _logits_of_slice(attn_metadata, begin, end)
    return attn_metadata.replace(
        query_start_loc=attn_metadata.query_start_loc[starts].clamp(begin, end) - begin,
        query_start_loc_cpu=new_start_cpu,
        seq_lens=_shortened(attn_metadata.seq_lens, requests, cut),
        seq_lens_cpu=seq_cpu,
        num_computed_tokens_cpu=computed,
        num_reqs=requests.stop - requests.start,
        num_actual_tokens=end - begin,
        max_query_len=int(query.max()) or attn_metadata.max_query_len,
        max_seq_len=attn_metadata.max_seq_len if seq_cpu is None else int(seq_cpu.max()),
        block_table_tensor=attn_metadata.block_table_tensor[requests],
        slot_mapping=attn_metadata.slot_mapping[tokens],
        encoder_seq_lens=_part(attn_metadata.encoder_seq_lens, requests),
        seq_lens_cpu_upper_bound=_shortened(attn_metadata.seq_lens_cpu_upper_bound, requests, cut),
        is_prefilling=_part(attn_metadata.is_prefilling, requests),
        dcp_local_seq_lens=None if cut else _part(attn_metadata.dcp_local_seq_lens, requests),
        positions=_part(attn_metadata.positions, tokens),
        num_logits=None,
        window_block_table_tensor=_part(attn_metadata.window_block_table_tensor, requests),
        window_slot_mapping=_part(attn_metadata.window_slot_mapping, tokens),
        **changes,
    )


def _check_slices(
    ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata, start: np.ndarray
) -> None:
    """Raise a ValueError unless the rows of the slice belong to its first to its last request."""
    rows = attn_metadata.slot_mapping.shape[0]
    for name, part, size in (
        ("request_slice", ubatch_slice.request_slice, attn_metadata.num_reqs),
        ("token_slice", ubatch_slice.token_slice, rows),
    ):
        _check_part(name, part, size, least=1)
    first, last = ubatch_slice.request_slice.start, ubatch_slice.request_slice.stop - 1
    begin, end = ubatch_slice.token_slice.start, ubatch_slice.token_slice.stop
    # A request without query tokens owns the empty range at its start.
    begins_inside = start[first] <= begin < start[first + 1] or begin == start[first]
    ends_inside = start[last] < end <= start[last + 1] or end == start[last + 1]
    if last + 1 == attn_metadata.num_reqs:
        ends_inside = ends_inside or end > start[-1]
    if not begins_inside:
        raise ValueError(
            f"token_slice must start in the rows {start[first]} to {start[first + 1] - 1} of its "
            f"first request {first}, got {begin}"
        )
    if not ends_inside:
        raise ValueError(
            f"token_slice must stop in the rows {start[last]} to {start[last + 1] - 1} of its "
            f"last request {last}, got {end}"
        )


def _check_part(name: str, part: slice, size: int, least: int) -> None:
    """Raise a ValueError unless `part` is a slice of `least` entries or more within 0 to `size`."""
    ends = (part.start, part.stop)
    if part.step is not None or not all(isinstance(end, (int, np.integer)) for end in ends):
        raise ValueError(f"{name} must have an int start and stop and no step, got {part}")
    if part.start < 0 or not (part.start + least <= part.stop <= size):
        what = "and not empty, " if least else ""
        raise ValueError(f"{name} must be a part of 0 to {size} {what}got {part}")


def _part(field: Any, entries: slice) -> Any:
    return None if field is None else field[entries]


def _shortened(lengths: Any, requests: slice, cut: int) -> Any:
    """Lengths of the slice's requests, the last one shorter by `cut`; a view if nothing is cut."""
    if lengths is None or cut == 0:
        return _part(lengths, requests)
    lengths = lengths[requests].clone()
    lengths[-1:].sub_(cut).clamp_(min=0)  # a padding request has no tokens to leave out
    return lengths


def _logits_of_slice(
    attn_metadata: CommonAttentionMetadata, begin: int, end: int
) -> dict[str, Any]:
    """Fields about logits, counted from the slice's first row; None where the host cannot know."""
    rows_cpu = attn_metadata.logits_indices_cpu
    padded = attn_metadata.logits_indices_padded
    count = attn_metadata.num_logits_indices
    if rows_cpu is None and count is not None and padded is not None and padded.is_cpu:
        rows_cpu = padded[:count]
    if rows_cpu is None or attn_metadata.num_logits is not None:
        names = ("logits_indices", "logits_indices_cpu", "logits_indices_padded")
        return dict.fromkeys((*names, "num_logits_indices"))
    kept = rows_cpu[(rows_cpu >= begin) & (rows_cpu < end)] - begin
    on_device = kept.to(attn_metadata.device, non_blocking=True, copy=True)
    return {
        "logits_indices_cpu": kept,
        "logits_indices": None
        if attn_metadata.logits_indices is None
        else on_device.to(torch.int64, copy=True),
        "logits_indices_padded": None if padded is None else on_device.to(padded.dtype),
        "num_logits_indices": None if padded is None else kept.shape[0],
    }
