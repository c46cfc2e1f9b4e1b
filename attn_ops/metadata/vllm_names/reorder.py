"""The order of a batch in which its decodes stand in front of its prefills."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


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
