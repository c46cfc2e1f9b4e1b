"""Blocks of the requests that run: how far they reach, and what is taken before they are written.

By need, a request owns blocks for its known tokens and for the steps that may be launched before
it is asked again. By length, it owns blocks for its longest sequence from the beginning.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from attn_ops import PagedKVCache
from attn_ops.prefixes import NO_MATCH, Match
from attn_ops.states import NULL_SLOT
from graphs.requests.batch import FAR, After, Known
from graphs.requests.requests import Request

STRIDE = 64
"""Tokens by which requests grow while blocks are plentiful: tables on the device change rarely."""


@dataclasses.dataclass(frozen=True)
class PreemptionCounts:
    """What it has cost so far that requests grew out of the cache."""

    num_preemptions: int  # times that a request gave its blocks back and returned to the queue
    num_recomputed_tokens: int  # that were computed once more

    def __str__(self) -> str:
        return (
            f"{self.num_preemptions:,}; {self.num_recomputed_tokens:,} tokens were computed again"
        )


class _Tokens(NamedTuple):
    """Tokens of a request that its blocks hold."""

    whole: int  # those of layers that see all keys, or of all layers
    window: int  # those of layers with a window, where they have their own


class Reservations:
    """Reserves blocks for requests and gives them back.

    Args:
        cache: of all requests.
        lookahead: tokens behind a request's last one that may be written before it is asked whether
            it lacks room; None: reserve by length.
        max_tokens_per_step: most tokens of a prompt that are computed at a time.

    Attributes:
        num_released: times that blocks behind a window went back. Tables on the device that are
            older still name them.
    """

    def __init__(
        self, cache: PagedKVCache, lookahead: int | None, max_tokens_per_step: int
    ) -> None:
        self.cache, self._window = cache, cache.window
        self._is_split = cache.window_pool is not None
        # Blocks behind the window go back while a prompt is computed: it needs few at a time.
        self._chunk = FAR if self._window is None else max_tokens_per_step
        self._most = FAR if self._is_split else self._chunk
        assert lookahead is not None or not self._is_split, "few blocks of windows, taken by need"
        self.by_length, self.lookahead = lookahead is None, lookahead or 0
        self._num_preemptions = self._num_recomputed_tokens = 0
        self.num_released = 0

    def counts(self) -> PreemptionCounts | None:
        """What preemption has cost; None: whole lengths are reserved, and nobody is preempted."""
        if self.by_length:
            return None
        return PreemptionCounts(self._num_preemptions, self._num_recomputed_tokens)

    def fits(
        self, request: Request, match: Match, running: Sequence[Request], releases: bool
    ) -> bool:
        """Whether a request that waits can be admitted beside those that run.

        A block for each of them stays free, so that the next ones need not be preempted at once.

        Args:
            request: that waits.
            match: what it shares.
            running: those that run.
            releases: give blocks of those back that lie behind the window, if others are too few.
        """
        spare = 0 if self.by_length else len(running)
        first = self._first(request, match)
        asked = (request.id, first.whole, match, first.window, spare)
        if self.cache.has_room(*asked):
            return True
        needed = self.cache.blocks_needed(request.id, first.whole, match) + spare
        if not releases or (self._is_split and needed > self.cache.num_free_blocks):
            return False  # blocks of layers that see all keys do not go back
        return self.release(running) and self.cache.has_room(*asked)

    def admit(self, request: Request, match: Match) -> None:
        """Take its first blocks."""
        request.num_released = 0
        self._reserve(request, self._first(request, match), match)
        self._num_recomputed_tokens += max(0, request.num_lost - match.num_tokens)
        request.num_lost = 0

    def short(self, known: Known, after: After) -> list[Request]:
        """Those whose next steps would write behind their blocks."""
        if self.by_length:
            return []
        # Launched steps draw a token each at most. It is cheaper not to look them up.
        most = after.num_steps + self.lookahead
        near = known.rooms < np.minimum(known.packed["end"] - 1, known.lengths + most)
        found = (known.requests[row] for row in np.nonzero(near)[0].tolist())
        return [r for r in found if self._lacks(r, self._wanted(r, after))]

    def extend(self, request: Request, running: Sequence[Request], after: After) -> bool:
        """Take blocks for the next steps; False: too few are free.

        Blocks behind the window go back first, and those of all that run, if they are needed. So
        tables change rarely.
        """
        self._release(request)
        wanted = self._wanted(request, after)
        fits = self._has_room(request, wanted)
        fits = fits or (self.release(running) and self._has_room(request, wanted))
        if fits:
            self._reserve(request, wanted)
        return fits

    def extend_all(self, requests: Sequence[Request], after: After) -> None:
        """Take more blocks than the next steps need, as long as nobody else needs them soon."""
        for request in requests:
            wanted = self._wanted(request, after, max(STRIDE, self.lookahead))
            if not self._lacks(request, wanted):
                continue
            self._release(request)
            if not self._has_room(request, wanted, spare=len(requests)):
                return
            self._reserve(request, wanted)

    def give_back(self, request: Request) -> None:
        """Give all blocks back, if it owns any."""
        request.room, request.state_slots = 0, (NULL_SLOT,)
        if self.cache.blocks(request.id):
            self.cache.free(request.id)

    def preempt(self, request: Request) -> None:
        """Give the blocks of a request back that will be admitted again."""
        self.give_back(request)
        self._num_preemptions += 1
        request.num_lost, request.num_computed = request.num_computed, 0

    def release(self, running: Iterable[Request]) -> bool:
        """Give blocks of all that run back which lie behind the window; whether there were any."""
        before = self.num_released
        for request in running:
            self._release(request)
        return self.num_released != before

    def _release(self, request: Request) -> None:
        """Give blocks back that lie behind the window of the layers."""
        if self._window is None:
            return
        number = self.cache.first_seen(request.num_computed)
        if number > request.num_released:
            self.cache.release(request.id, number)
            self.num_released += 1
            request.num_released = number

    def _first(self, request: Request, match: Match) -> _Tokens:
        """Those for which a request takes blocks when it is admitted."""
        computed = match.num_tokens + (self._window or 0)
        return self._tokens(request, computed, request.num_tokens, self.lookahead)

    def _wanted(self, request: Request, after: After, more: int | None = None) -> _Tokens:
        """Those that its blocks must hold in the next steps; with so many `more`."""
        computed, length, _ = after.place(request)
        return self._tokens(request, computed, length, self.lookahead if more is None else more)

    def _tokens(self, request: Request, computed: int, length: int, more: int) -> _Tokens:
        if self.by_length:
            return _Tokens(request.longest, request.longest)
        whole, window = (
            min(request.longest, min(length, computed + most) + more)
            for most in (self._most, self._chunk)
        )
        return _Tokens(whole, window)

    def _has_room(self, request: Request, wanted: _Tokens, spare: int = 0) -> bool:
        return self.cache.has_room(
            request.id, wanted.whole, window_tokens=wanted.window, spare=spare
        )

    def _lacks(self, request: Request, wanted: _Tokens) -> bool:
        return request.room < wanted.window or request.whole_room < wanted.whole

    def _reserve(self, request: Request, wanted: _Tokens, match: Match = NO_MATCH) -> None:
        self.cache.reserve(request.id, wanted.whole, match, wanted.window)
        room, window_room = self.cache.rooms(request.id)
        request.whole_room, request.room = room, min(room, window_room)
        if self.cache.states is not None:
            request.state_slots = self.cache.states.slots(request.id)
