"""Blocks of the requests that run: how far they reach, and what is taken before they are written.

By need, a request owns blocks for its known tokens and for the steps that may be launched before
it is asked again. By length, it owns blocks for its longest sequence from the beginning.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from attn_ops import PagedKVCache
from attn_ops.prefixes import NO_MATCH, Match
from graphs.requests.requests import Request
from graphs.requests.scheduled import FAR, After

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
        # Blocks behind the window go back while a prompt is computed: it needs few at a time.
        self._most = FAR if self._window is None else max_tokens_per_step
        self.by_length, self.lookahead = lookahead is None, lookahead or 0
        self._num_preemptions = self._num_recomputed_tokens = 0
        self.num_released = 0

    def counts(self) -> PreemptionCounts | None:
        """What preemption has cost; None: whole lengths are reserved, and nobody is preempted."""
        if self.by_length:
            return None
        return PreemptionCounts(self._num_preemptions, self._num_recomputed_tokens)

    def fits(self, request: Request, match: Match, num_running: int) -> bool:
        """Whether a request that waits can be admitted beside those that run.

        A block for each of them stays free, so that the next ones need not be preempted at once.
        """
        spare = 0 if self.by_length else num_running
        needed = self.cache.blocks_needed(request.id, self._first(request, match), match)
        return needed + spare <= self.cache.num_free_blocks

    def admit(self, request: Request, match: Match) -> None:
        """Take its first blocks. What was interrupted can be done again after `give_back`."""
        request.num_released = 0
        self._reserve(request, self._first(request, match), match)
        self._num_recomputed_tokens += max(0, request.num_lost - match.num_tokens)
        request.num_lost = 0

    def short(self, requests: Sequence[Request], after: After) -> list[Request]:
        """Those whose next steps would write behind their blocks."""
        if self.by_length:
            return []
        # Launched steps draw a token each at most. It is cheaper not to look them up.
        most = after.num_steps + self.lookahead
        near = [
            r for r in requests
            if r.room < r.end - 1 and r.room < len(r.prompt) + len(r.token_ids) + most
        ]  # fmt: skip
        return [r for r in near if r.room < self._wanted(r, after)]

    def extend(self, request: Request, after: After) -> bool:
        """Take blocks for the next steps; False: too few are free, and nothing has changed."""
        wanted = self._wanted(request, after)
        if self.cache.blocks_needed(request.id, wanted) > self.cache.num_free_blocks:
            return False
        self._reserve(request, wanted)
        return True

    def extend_all(self, requests: Sequence[Request], after: After) -> None:
        """Take more blocks than the next steps need, as long as nobody else needs them soon."""
        for request in requests:
            computed, length, _ = after.place(request)
            length = min(length, computed + self._most)
            wanted = min(request.longest, length + max(STRIDE, self.lookahead))
            if request.room >= wanted:
                continue
            needed = self.cache.blocks_needed(request.id, wanted)
            if needed + len(requests) > self.cache.num_free_blocks:
                return
            self._reserve(request, wanted)

    def give_back(self, request: Request) -> None:
        """Give all blocks back, if it owns any."""
        request.room = 0  # first: it never says more than there is
        if self.cache.blocks(request.id):
            self.cache.free(request.id)

    def preempt(self, request: Request) -> None:
        """The same of a request that will be admitted again; it may be interrupted and repeated."""
        self.give_back(request)
        if request.num_computed:
            self._num_preemptions += 1
            request.num_lost = max(request.num_lost, request.num_computed)
            request.num_computed = 0

    def release(self, running: Iterable[Request]) -> None:
        """Give blocks back that lie behind the window of all layers."""
        if self._window is None:
            return
        size = self.cache.block_size
        window = max(self._window, size + 1)  # every slot of the first block that stays is written
        for request in running:
            number = (request.num_computed - window + 1) // size
            if number > request.num_released:
                self.num_released += 1  # first: a table is never older than it seems
                self.cache.release(request.id, number)
                request.num_released = number

    def _first(self, request: Request, match: Match) -> int:
        """Tokens for which a request takes blocks when it is admitted."""
        if self.by_length:
            return request.longest
        length = min(request.num_tokens, match.num_tokens + (self._window or 0) + self._most)
        return min(request.longest, length + self.lookahead)

    def _wanted(self, request: Request, after: After) -> int:
        """Tokens that its blocks must hold in the next steps."""
        if self.by_length:
            return request.longest
        computed, length, _ = after.place(request)
        return min(request.longest, min(length, computed + self._most) + self.lookahead)

    def _reserve(self, request: Request, num_tokens: int, match: Match = NO_MATCH) -> None:
        blocks = self.cache.reserve(request.id, num_tokens, match)
        request.room = len(blocks) * self.cache.block_size
