"""Decodes in front of prefills: the batch's order, and where its decodes end.

S requests; decodes have at most `decode_threshold` query tokens and stand first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from attn_ops.metadata.common import CommonAttentionMetadata


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """The boundary between decodes and prefills of a batch whose decodes stand first.

    Args:
        common_attn_metadata: the batch; its query_start_loc_cpu is read.
        decode_threshold: the longest query that counts as a decode.
        require_uniform: decodes must have one query length; the first request of another length and
            all behind it count as prefills, however short. A batch whose num_actual_tokens is
            padded to one query length for every request is all decodes, those of 0 tokens too.

    Returns:
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens. Padding rows that
        num_actual_tokens counts belong to the last kind.

    Raises:
        ValueError: query_start_loc_cpu is needed and not there.
    """
    num_reqs = common_attn_metadata.num_reqs
    num_tokens = common_attn_metadata.num_actual_tokens
    all_decodes = (num_reqs, 0, num_tokens, 0)
    uniform = require_uniform and decode_threshold > 1
    if num_reqs == 0 or (common_attn_metadata.max_query_len <= decode_threshold and not uniform):
        return all_decodes
    if common_attn_metadata.query_start_loc_cpu is None:
        raise ValueError("query_start_loc_cpu must be given to split a mixed batch, got None")
    start = common_attn_metadata.query_start_loc_cpu.numpy()
    query = np.diff(start)
    if query[0] > decode_threshold:
        return 0, num_reqs, 0, num_tokens
    if not require_uniform:
        is_prefill = query > decode_threshold
    elif num_tokens == num_reqs * query[0] and ((query == query[0]) | (query == 0)).all():
        return all_decodes
    else:
        is_prefill = query != query[0]
    if not is_prefill.any():
        return all_decodes
    num_decodes = int(is_prefill.argmax())
    num_decode_tokens = int(start[num_decodes])
    return num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens


class InputBatch(Protocol):
    """What reordering needs of an engine's batch."""

    @property
    def req_ids(self) -> Sequence[Any]: ...

    def swap_states(self, i1: int, i2: int) -> Any: ...


class SchedulerOutput(Protocol):
    """What reordering needs of an engine's schedule."""

    @property
    def num_scheduled_tokens(self) -> Mapping[Any, int]: ...


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: InputBatch, scheduler_output: SchedulerOutput, decode_threshold: int = 1
) -> bool:
    """Bring decodes to the front of the batch with the fewest swaps.

    A decode stands wrong if its index is not below the number of decodes. Each one, from the back,
    changes places with the foremost prefill that stands wrong.

    Args:
        input_batch: `req_ids` and `swap_states(i, j)`, which is called once a swap.
        scheduler_output: `num_scheduled_tokens` by request id.
        decode_threshold: the most scheduled tokens of a decode.

    Returns:
        Whether anything was swapped.
    """
    req_ids = input_batch.req_ids
    scheduled = map(scheduler_output.num_scheduled_tokens.__getitem__, req_ids)
    is_decode = np.fromiter(scheduled, dtype=np.int64, count=len(req_ids)) <= decode_threshold
    num_decodes = int(np.count_nonzero(is_decode))
    prefills = np.flatnonzero(~is_decode[:num_decodes])
    decodes = num_decodes + np.flatnonzero(is_decode[num_decodes:])[::-1]
    for prefill, decode in zip(prefills.tolist(), decodes.tolist(), strict=True):
        input_batch.swap_states(prefill, decode)
    return prefills.size > 0
