"""Prefixes that requests share: what a prompt finds in the cache, and what it leaves there.

    waiting request -> find -> shared blocks -> computed prompt -> keep -> the next one finds it

A block's content depends on its tokens, all tokens before them and the model. So everything is
forgotten when the model has changed, before anything is looked up. Of a request that began before
that, nothing is kept.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

from attn_ops import PagedKVCache
from attn_ops.prefixes import NO_MATCH, Key, Match, block_keys
from graphs.requests.batch import After
from graphs.requests.requests import Request


class Watched(Protocol):
    """Says whether a model's weights have changed."""

    def changed(self, *, values_too: bool = False) -> bool: ...

    def remember(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class PrefixCounts:
    """What sharing has saved so far."""

    num_requests: int  # that looked for a prefix
    num_hits: int  # of those, that found one
    num_prompt_tokens: int  # of all of them
    num_shared_tokens: int  # of those, that were found
    num_kept_blocks: int  # whose tokens a new request may find
    num_evicted: int  # blocks that were kept and taken for something else
    num_forgotten: int  # times that the model changed, or the caller had everything forgotten

    def __str__(self) -> str:
        return (
            f"{self.num_shared_tokens:,} of {self.num_prompt_tokens:,} prompt tokens were found, "
            f"by {self.num_hits:,} of {self.num_requests:,} requests; {self.num_kept_blocks:,} "
            f"blocks kept, {self.num_evicted:,} evicted, forgotten {self.num_forgotten:,} times"
        )


class PrefixSharing:
    """Finds and keeps blocks of the requests that share.

    Args:
        cache: of all requests.
        weights: of the model; None: nothing is shared.

    Attributes:
        num_forgotten: times that everything was forgotten.
    """

    def __init__(self, cache: PagedKVCache, weights: Watched | None) -> None:
        self.cache, self._weights = cache, weights
        self.num_forgotten = 0
        self._num_requests = self._num_hits = 0
        self._num_prompt_tokens = self._num_shared_tokens = 0

    @property
    def is_on(self) -> bool:
        return self._weights is not None

    def counts(self) -> PrefixCounts | None:
        """What it has saved; None: it is off."""
        if not self.is_on:
            return None
        return PrefixCounts(
            self._num_requests,
            self._num_hits,
            self._num_prompt_tokens,
            self._num_shared_tokens,
            self.cache.num_kept_blocks,
            self.cache.pool.num_evicted,
            self.num_forgotten,
        )

    def refresh(self, *, idle: bool) -> None:
        """Forget everything if weights have changed.

        `idle`: nothing runs; then those writes are found, too, that torch does not count.
        """
        if self._weights is not None and self._weights.changed(values_too=idle):
            self.forget()

    def forget(self) -> None:
        """Find nothing of what was computed so far, in requests that still run too."""
        if self._weights is not None:
            self.num_forgotten += 1  # so nothing is kept of what runs, which was computed before
            self.cache.forget_prefixes()
            self._weights.remember()  # what is kept from here on is of the weights as they are now

    # -- what a prompt finds -----------------------------------------------------------------------

    def find(self, request: Request) -> Match:
        """What the cache holds of all known tokens before the first whose logits are wanted."""
        if not (self.is_on and request.share_prefix):
            return NO_MATCH
        tokens = _tokens(request, min(request.num_tokens - 1, request.first_unscored()))
        return self.cache.match(tokens, self._keys_of(request, tokens))

    def awaits(self, request: Request, match: Match, promised: dict[Key, int]) -> bool:
        """Whether an older request is about to compute the block behind those that were found.

        Only older ones count, of which there are ever fewer: so nobody waits for ever.
        """
        if not promised or not request.share_prefix:
            return False
        number = len(match.blocks)
        last = min(len(request.prompt) - 1, request.first_unscored())
        if match.num_tokens >= min((number + 1) * self.cache.block_size, last):
            return False  # nothing is left to find in that block
        return promised.get(self._keys(request)[number], request.id) < request.id

    def promised(self, running: Iterable[Request]) -> dict[Key, int]:
        """Blocks that running requests have yet to compute, and for each the first request."""
        promised: dict[Key, int] = {}
        for request in _with_more(running) if self.is_on else ():
            self.promise(request, promised)
        return promised

    def promise(self, request: Request, promised: dict[Key, int]) -> None:
        """Add the blocks of a prompt that are not computed."""
        kept_later = request.share_prefix and request.begun_at == self.num_forgotten
        if not (self.is_on and kept_later):
            return
        for key in self._keys(request)[request.num_computed // self.cache.block_size :]:
            promised.setdefault(key, request.id)

    def admit(self, request: Request, match: Match) -> None:
        """The request begins with what was found."""
        is_new, request.begun_at = request.begun_at < 0, self.num_forgotten
        request.num_kept = 0
        if self.is_on:
            request.num_computed = match.num_tokens
        if self.is_on and request.share_prefix and is_new:
            self._num_requests += 1
            self._num_hits += match.num_tokens > 0
            self._num_prompt_tokens += len(request.prompt)
            self._num_shared_tokens += match.num_tokens

    # -- what it leaves ----------------------------------------------------------------------------

    def keep_prompts(self, running: Iterable[Request], after: After) -> None:
        """Keep what has been computed of prompts since the last call.

        What launched steps compute is kept too: whoever finds it reads it after them.
        """
        for request in _with_more(running):
            num_computed = after.place(request)[0]
            self._keep(request, min(num_computed, len(request.prompt)))

    def keep_all(self, request: Request) -> None:
        """Keep what was computed for a request that leaves, generated tokens too."""
        if self.is_on and request.share_prefix:
            self._keep(request, request.num_computed)

    def _keep(self, request: Request, num_tokens: int) -> None:
        if num_tokens > request.num_kept and request.begun_at == self.num_forgotten:
            if num_tokens < len(request.prompt):
                # A part of a block is kept at a prompt's end.
                num_tokens -= num_tokens % self.cache.block_size
            tokens = _tokens(request, num_tokens)
            self.cache.keep(request.id, tokens, self._keys_of(request, tokens))
        request.num_kept = max(request.num_kept, num_tokens)

    def _keys_of(self, request: Request, tokens: Sequence[int]) -> Sequence[Key]:
        """Of the blocks of its first tokens, which may go on behind its prompt."""
        size = self.cache.block_size
        known = self._keys(request)[: min(len(tokens), len(request.prompt)) // size]
        return block_keys(tokens, size, known)

    def _keys(self, request: Request) -> Sequence[Key]:
        """Of the prompt's blocks, the last one too where it is not full."""
        if not request.block_keys:
            tokens = _tokens(request, len(request.prompt))
            request.block_keys = block_keys(tokens, self.cache.block_size)
        return request.block_keys


def _tokens(request: Request, number: int) -> list[int]:
    """Its first tokens; where positions are shifted, others: their keys and values are others."""
    tokens = request.tokens(0, number)
    if request.embeds is not None:
        keys = request.embeds.keys[:number]
        tokens[: len(keys)] = keys
    return [token + request.shift for token in tokens]


def _with_more(running: Iterable[Request]) -> list[Request]:
    """Requests of whose prompts not everything is kept yet."""
    return [r for r in running if r.num_kept < len(r.prompt) and r.share_prefix]
