"""Which requests run in the next step, with how many tokens each: simple continuous batching.

Requests are admitted in order of arrival, as soon as the cache can hold what they need now. They
get more blocks as they grow. Where none is left, the youngest running request is preempted: it
gives its blocks back, and its known tokens are computed again when it is admitted again. The oldest
one is never preempted, so every request ends. Younger ones pass a request that waits for an older
one to compute the prefix that they share. A step takes one token of every decoding request first,
requests with one prefix beside each other, then prompt chunks up to the token budget, oldest first.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from attn_ops import PagedKVCache
from attn_ops.prefixes import Match
from graphs.requests.batch import NOTHING, After, Columns, Known, Rows
from graphs.requests.blocks import Reservations
from graphs.requests.prefixes import PrefixSharing, Watched
from graphs.requests.requests import Request
from graphs.requests.state_prefixes import StatePrefixSharing
from graphs.requests.state_slots import lost


class Scheduler:
    """Waiting and running requests.

    Args:
        cache: where admitted requests reserve their blocks.
        max_batch_size: requests that run at a time.
        max_tokens_per_step: token budget of a step.
        weights: of the model, where requests share their prefixes; None: they do not.
        lookahead: see `Reservations`.
        max_scored: rows of prompts that a step scores at most.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        max_batch_size: int,
        max_tokens_per_step: int,
        weights: Watched | None = None,
        lookahead: int | None = 1,
        max_scored: int = 1024,
    ) -> None:
        self.cache, self.prefixes = cache, PrefixSharing(cache, weights)
        if cache.states is not None:
            self.prefixes = StatePrefixSharing(cache, weights, cache.states)
        self.reservations = Reservations(cache, lookahead, max_tokens_per_step)
        self.max_batch_size = max_batch_size
        self.max_tokens_per_step, self.max_scored = max_tokens_per_step, max_scored
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def next_step(self, after: After = NOTHING) -> Rows:
        """The next step's requests, decodes first; empty when nothing is left to do.

        Empty too where blocks are short until tokens of launched steps are read: then requests
        leave that have ended in them.

        Args:
            after: the steps that are launched. A request that ends in them by its length takes
                part no more; one that draws a stop token in them does, and is told later.
        """
        if self.prefixes.is_on:
            self.prefixes.refresh(idle=not self.running)
            self.prefixes.keep_prompts(self.running, after)
            self.reservations.release(self.running)
        for request in () if self.cache.states is None else lost(self.running, after):
            self._preempt(request)
        known = Known.of(self.running)
        short = self.reservations.short(known, after)
        if not self._extend(short, after):
            return Rows()
        if len(self.running) == len(known.requests):  # who was preempted needs more than is free
            self._admit(after)
        if self.prefixes.is_on:
            self.cache.copy_partial()
        if short or len(self.running) != len(known.requests):
            known = Known.of(self.running)
        return self._filled(known, after)

    def _extend(self, short: list[Request], after: After) -> bool:
        """Give requests the blocks of their next steps; False: wait for those that have ended."""
        extend = self.reservations.extend
        for request in sorted(short, key=lambda r: r.id):
            while request in self.running and not extend(request, self.running, after):
                if any(map(after.has_ended, self.running)):
                    return False  # one launch later is better than computing a prompt again
                self._preempt(max(self.running, key=lambda r: r.id))
        if short:
            self.reservations.extend_all(self.running, after)
        return True

    def _filled(self, known: Known, after: After) -> Rows:
        """Rows of running requests up to the budget: one of every decode, then of prompts."""
        requests, budget = known.requests, self.max_tokens_per_step
        computed, lengths, sources = after.places(requests, known.lengths)
        is_prompt = computed < lengths - 1
        (decodes,) = np.nonzero(~is_prompt & (lengths < known.packed["end"]))
        most = min(budget, self.max_batch_size)
        if decodes.size > most or (decodes.size == most and is_prompt.any()):
            decodes = _oldest(requests, decodes, is_prompt, most)
        if decodes.size == len(requests):  # as in most steps: nothing is chosen
            ones = np.ones(decodes.size, dtype=np.int64)
            columns = Columns(requests, known.packed, ones, computed, lengths, ones.astype(bool),
                              known.rooms, sources)  # fmt: skip
            return Rows(columns, self.reservations.num_released)
        # Those that run are neighbours by prefix.
        prompts = sorted(np.nonzero(is_prompt)[0].tolist(), key=lambda row: requests[row].id)
        prompts, budget = prompts[: self.max_batch_size - decodes.size], budget - decodes.size
        chunks, scored = [], self.max_scored
        for row in prompts:
            wanted, begin = int(lengths[row] - computed[row]), int(computed[row])
            before = max(int(known.packed["scored"][row, 0]) - begin, 0)  # rows without a score
            number = min(wanted, budget, before + scored)
            if number <= 0:
                break
            chunks.append(number)
            budget, scored = budget - number, scored - max(number - before, 0)
        rows = np.append(decodes, np.array(prompts[: len(chunks)], dtype=np.int64))
        num_tokens = np.ones(rows.size, dtype=np.int64)
        num_tokens[decodes.size :] = chunks
        wants_token = computed[rows] + num_tokens >= lengths[rows]
        sources[is_prompt] = -1
        columns = Columns([requests[row] for row in rows.tolist()], known.packed[rows], num_tokens,
                          computed[rows], lengths[rows], wants_token, known.rooms[rows],
                          sources[rows])  # fmt: skip
        return Rows(columns, self.reservations.num_released)

    def stays(self, rows: Rows, after: After) -> bool:
        """Whether the next step after the launched ones has the requests and blocks of `rows`."""
        if rows.requests != self.running or self._is_older(rows):
            return False
        releases = not self.prefixes.is_on  # which keep blocks in `next_step` alone
        if next(self._admissible(after, releases=releases), None) is not None:
            return False
        return not self._is_older(rows)

    def _is_older(self, rows: Rows) -> bool:
        """Whether blocks behind a window have gone back since the rows were scheduled."""
        return rows.num_released != self.reservations.num_released

    def leave(self, request: Request) -> None:
        """Take a request out, finished or not, and give its blocks back."""
        if request in self.running:
            self.prefixes.keep_all(request)
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.reservations.give_back(request)

    def _preempt(self, request: Request) -> None:
        """Put a running request back in front of all younger ones that wait."""
        self.prefixes.keep_all(request)
        self.reservations.preempt(request)
        self.running.remove(request)
        older = sum(other.id < request.id for other in self.waiting)
        self.waiting.insert(older, request)

    def _admit(self, after: After) -> None:
        for request, match in self._admissible(after):
            self.reservations.admit(request, match)
            self.prefixes.admit(request, match)
            self.running.insert(self._place(match), request)
            self.waiting.remove(request)

    def _place(self, match: Match) -> int:
        """Where a request joins those that run: behind the last that has the same prefix.

        Neighbours may attend to it once; see `graphs.step.shared`.
        """
        number, tables = len(match.blocks), self.cache.pool.tables
        for place in range(len(self.running), 0, -1) if number else ():
            blocks = tables[self.running[place - 1].id].blocks
            if len(blocks) >= number and blocks[number - 1] == match.blocks[-1]:
                return place
        return len(self.running)

    def _admissible(
        self, after: After, *, releases: bool = True
    ) -> Iterator[tuple[Request, Match]]:
        """Requests that can run, and what each shares; the caller admits one before the next.

        `releases`: see `Reservations.fits`.
        """
        passed, promised = 0, None
        num_ended = after.num_ended(self.running) if self.waiting else 0
        while passed < min(len(self.waiting), self.max_batch_size):
            request = self.waiting[passed]
            if len(self.running) - num_ended >= self.max_batch_size or request in after:
                return  # in launched steps: it was preempted since, and they count for nothing
            if promised is None:
                promised = self.prefixes.promised(self.running)
            match = self.prefixes.find(request)
            if self.prefixes.awaits(request, match, promised):
                passed += 1
                continue
            if not self.reservations.fits(request, match, self.running, releases):
                return
            yield request, match
            self.prefixes.promise(request, promised)


def _oldest(
    requests: Sequence[Request], decodes: np.ndarray, is_prompt: np.ndarray, most: int
) -> np.ndarray:
    """At most so many of the decodes, as rows in order: those of the oldest requests.

    If the oldest request of all is a prompt, a token is left for it. So it ends, and then the next.
    """
    by_age = sorted(decodes.tolist(), key=lambda row: requests[row].id)
    oldest = min(range(len(requests)), key=lambda row: requests[row].id)
    return np.array(sorted(by_age[: most - bool(is_prompt[oldest])]), dtype=np.int64)
