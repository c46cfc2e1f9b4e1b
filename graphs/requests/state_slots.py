"""States of requests in steps: what they have seen, and where those behind single rows are kept."""

from collections.abc import Sequence

import numpy as np

from attn_ops.states import NULL_SLOT, StatePool
from graphs.requests.batch import After, Rows, numbers_of
from graphs.requests.requests import Request


def advance_states(step: Rows, num_steps: int) -> None:
    """Note, before a launch, what the requests' states see until `num_steps` steps are over."""
    columns = step.columns
    seen = columns.num_computed + columns.num_tokens + (num_steps - 1)
    for request, number in zip(columns.requests, seen.tolist(), strict=True):
        request.num_seen = number


def lost(running: Sequence[Request], after: After) -> list[Request]:
    """Those whose states have seen a step that counts for nothing: it raised, or was dropped.

    They must be computed again: no step can be repeated on the states that it has left.
    """
    computed = after.places(running, np.zeros(len(running), dtype=np.int64))[0]
    seen = numbers_of((request.num_seen for request in running), running)
    (rows,) = np.nonzero((computed > 0) & (computed != seen))
    return [running[row] for row in rows.tolist()]


def fill_kept(kept: np.ndarray, step: Rows, start: np.ndarray) -> None:
    """Write the slots [T] that keep the states behind rows: of drafts, and of checkpoints.

    `start` [S + 1]: the first row of each request.
    """
    kept[:] = NULL_SLOT
    if step.num_draft:  # behind the last row it is the request's own
        slots = [(*request.state_slots[1:], NULL_SLOT) for request in step.requests]
        kept[: start[-1]] = np.array(slots).ravel()
    for row, request in enumerate(step.requests):
        for number, (_, slot) in request.checkpoints.items():
            place = start[row] + number - 1 - step.columns.num_computed[row]
            if start[row] <= place < start[row + 1]:
                kept[place] = slot


def accept_drafts(step: Rows, states: StatePool | None) -> None:
    """After its tokens were taken: requests go on from the states behind their last right rows."""
    if states is None:
        return
    for s in step:
        request = s.request
        if request.room:  # else it has ended
            states.choose(request.id, request.num_computed - s.num_computed)
            request.state_slots = states.slots(request.id)
            request.num_seen = request.num_computed
