"""Decodes before prefills: the order of a batch, and where its decodes end.

S requests; decodes have at most `decode_threshold` query tokens and come first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from attn_ops.metadata.common import CommonAttentionMetadata


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> tuple[int, int, int, int]:
    """The boundary between decodes and prefills of a batch whose decodes stand first.

    Args:
        common_attn_metadata: the batch; its query_start_loc_cpu is read.
        decode_threshold: the longest query that counts as a decode.
        require_uniform: decodes must have one query length; the first request of another length and
            all behind it count as prefills, however short. A batch whose num_actual_tokens is
            padded to one query length for every request is all decodes, those of 0 tokens too.
        treat_short_extends_as_decodes: False counts requests of `is_prefilling` as prefills, as in
            vLLM 0.24; not in a batch that is padded to one query length.

    Returns:
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens. Padding rows that
        num_actual_tokens counts belong to the last kind.

    Raises:
        ValueError: query_start_loc_cpu or is_prefilling is needed and not there.
    """
    num_reqs = common_attn_metadata.num_reqs
    num_tokens = common_attn_metadata.num_actual_tokens
    all_decodes = (num_reqs, 0, num_tokens, 0)
    uniform = require_uniform and decode_threshold > 1
    prefilling = None if treat_short_extends_as_decodes else _prefilling(common_attn_metadata)
    short = common_attn_metadata.max_query_len <= decode_threshold
    if num_reqs == 0 or (short and not uniform and prefilling is None):
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
    if prefilling is not None:
        is_prefill = is_prefill | prefilling
    if not is_prefill.any():
        return all_decodes
    num_decodes = int(is_prefill.argmax())
    num_decode_tokens = int(start[num_decodes])
    return num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens


def _prefilling(common: CommonAttentionMetadata) -> np.ndarray:
    if common.is_prefilling is None or not common.is_prefilling.is_cpu:
        raise ValueError(
            "is_prefilling must be given on the CPU unless treat_short_extends_as_decodes"
        )
    return common.is_prefilling.numpy()


def split_decodes_prefills_and_extends(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int, int, int]:
    """The boundaries of a batch that stands as decodes, extends, prefills (vLLM 0.24).

    Extends and prefills are longer than `decode_threshold`; prefills have no context.

    Returns:
        num_decodes, num_extends, num_prefills, and the tokens of each kind. Padding rows that
        num_actual_tokens counts belong to the last kind.

    Raises:
        ValueError: the mirrors of query_start_loc and of seq_lens, or its bound, are not there.
    """
    common = common_attn_metadata
    if common.max_query_len <= decode_threshold:
        return common.num_reqs, 0, 0, common.num_actual_tokens, 0, 0
    seq_lens = common.seq_lens_cpu
    seq_lens = common.seq_lens_cpu_upper_bound if seq_lens is None else seq_lens
    if common.query_start_loc_cpu is None or seq_lens is None:
        raise ValueError(
            "query_start_loc_cpu, and seq_lens_cpu or seq_lens_cpu_upper_bound must be given, "
            "got None"
        )
    start = common.query_start_loc_cpu.numpy()
    query = np.diff(start)
    is_long = query > decode_threshold
    ends = []  # of decodes, and of decodes and extends
    for later in (is_long, is_long & (seq_lens.numpy() == query)):
        ends.append(int(later.argmax()) if later.any() else common.num_reqs)
    tokens = [
        int(start[end]) if end < common.num_reqs else common.num_actual_tokens for end in ends
    ]
    return (
        *(ends[0], ends[1] - ends[0], common.num_reqs - ends[1]),
        *(tokens[0], tokens[1] - tokens[0], common.num_actual_tokens - tokens[1]),
    )


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
    input_batch: InputBatch,
    scheduler_output: SchedulerOutput,
    decode_threshold: int = 1,
    *,
    by_context: bool = False,
) -> bool:
    """Bring decodes to the front of the batch with the fewest swaps.

    A request stands wrong if another kind belongs at its index. Each decode that stands wrong, from
    the back, changes places with the foremost prefill that does.

    Args:
        input_batch: `req_ids` and `swap_states(i, j)`, which is called once a swap.
        scheduler_output: `num_scheduled_tokens` by request id.
        decode_threshold: the most scheduled tokens of a decode.
        by_context: sort as vLLM 0.24 does, by `num_computed_tokens_cpu` and `num_prompt_tokens` of
            the batch: decodes, short extends, long extends, then requests of which nothing is
            computed, however short. Those that stand wrong keep their order within a kind.

    Returns:
        Whether anything was swapped.

    Raises:
        ValueError: `by_context` needs lengths that the batch lacks.
    """
    req_ids = input_batch.req_ids
    scheduled = map(scheduler_output.num_scheduled_tokens.__getitem__, req_ids)
    kinds = np.fromiter(scheduled, dtype=np.int64, count=len(req_ids)) > decode_threshold
    if by_context:
        kinds = _kinds_by_context(input_batch, kinds)
    wrong = np.flatnonzero(kinds != np.sort(kinds))
    order = np.argsort(kinds[wrong], kind="stable") if by_context else slice(None, None, -1)
    sources = dict(zip(wrong.tolist(), wrong[order].tolist(), strict=True))
    for place, source in sources.items():
        while source < place:  # that request was swapped away
            source = sources[source]
        if source != place:
            input_batch.swap_states(place, source)
    return wrong.size > 0


def _kinds_by_context(input_batch: Any, is_long: np.ndarray) -> np.ndarray:
    """0 for decodes, 1 for short extends, 2 for long ones, 3 for requests without a context."""
    computed = getattr(input_batch, "num_computed_tokens_cpu", None)
    prompt = getattr(input_batch, "num_prompt_tokens", None)
    if computed is None or prompt is None:
        raise ValueError(
            "input_batch must have num_computed_tokens_cpu and num_prompt_tokens with by_context"
        )
    computed, prompt = computed[: is_long.size], prompt[: is_long.size]
    return np.where(computed == 0, 3, np.where(is_long, 2, computed < prompt))
