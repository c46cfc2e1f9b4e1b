"""Which requests run in the next step, with how many tokens each: simple continuous batching.

Requests are admitted in order of arrival, as soon as the cache can hold them at their longest;
none is ever preempted. A step takes one token of every decoding request first, then prompt
chunks up to the token budget.
"""

import dataclasses
from collections import deque

from attn_ops import PagedKVCache
from graphs.sampling import SamplingParams


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt and what has been generated for it."""

    id: int
    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingParams  # its seed is set
    eos: frozenset[int]
    max_tokens: int  # tokens of it that the cache may hold
    token_ids: list[int] = dataclasses.field(default_factory=list)  # generated
    num_computed: int = 0  # tokens whose keys and values are in the cache

    @property
    def finish_reason(self) -> str | None:
        """ "stop" (an eos token), "length", or None while it goes on.

        A function of the tokens: whoever is interrupted has appended a token and all that follows
        from it, or nothing.
        """
        if self.token_ids and self.token_ids[-1] in self.eos:
            return "stop"
        return "length" if self.remaining <= 0 else None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return min(self.max_new_tokens - len(self.token_ids), self.max_tokens + 1 - self.num_tokens)

    @property
    def longest(self) -> int:
        """Tokens the cache holds at most: the last generated one is never written."""
        return min(len(self.prompt) + self.max_new_tokens - 1, self.max_tokens)

    def tokens(self, begin: int, end: int) -> list[int]:
        """Tokens at positions begin to end, of the prompt and then of the generated ones."""
        split = len(self.prompt)
        return self.prompt[begin:end] + self.token_ids[max(0, begin - split) : max(0, end - split)]

    def append(self, token: int) -> None:
        """Take a generated token; its own keys and values are not in the cache, all others are.

        The token comes first. Interrupted behind it, one token more is computed again, as a chunk
        of a prompt is.
        """
        self.token_ids.append(token)
        self.num_computed = self.num_tokens - 1


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """One request's part of a step."""

    request: Request
    num_tokens: int
    draft: tuple[int, ...] = ()  # behind the last known token, and counted in num_tokens

    def tokens(self) -> list[int]:
        """The step's tokens of the request."""
        begin = self.request.num_computed
        end = begin + self.num_tokens - len(self.draft)
        return [*self.request.tokens(begin, end), *self.draft]

    @property
    def wants_token(self) -> bool:
        """Whether this step ends at the request's last known token, whose logits are sampled."""
        known = self.num_tokens - len(self.draft)
        return self.request.num_computed + known == self.request.num_tokens


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated for one prompt."""

    token_ids: list[int]  # without the prompt; ends with the eos token if one stopped it
    finish_reason: str  # "stop" (an eos token) or "length" (max_new_tokens or max_tokens)


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """One request's new token in one step."""

    request_id: int
    token_id: int
    finish_reason: str | None


class Scheduler:
    """Waiting and running requests.

    Args:
        cache: where admitted requests reserve their blocks.
        max_batch_size: requests that run at a time.
        max_tokens_per_step: token budget of a step.
    """

    def __init__(self, cache: PagedKVCache, max_batch_size: int, max_tokens_per_step: int) -> None:
        self.cache = cache
        self.max_batch_size = max_batch_size
        self.max_tokens_per_step = max_tokens_per_step
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._leaving: list[Request] = []  # whose place and blocks are being given back

    def next_step(self) -> list[Scheduled]:
        """The next step's requests, decodes first; empty when nothing is left to do."""
        for request in [r for r in self.running if r.finish_reason]:
            self.leave(request)  # interrupted before it could
        self._empty()
        self._admit()
        decoding = [r for r in self.running if r.num_computed == r.num_tokens - 1]
        step = [Scheduled(r, 1) for r in decoding[: self.max_tokens_per_step]]
        budget = self.max_tokens_per_step - len(step)
        for request in self.running:
            chunk = min(request.num_tokens - request.num_computed, budget)
            if chunk > 0 and request.num_computed < request.num_tokens - 1:
                step.append(Scheduled(request, chunk))
                budget -= chunk
        return step

    @property
    def can_admit(self) -> bool:
        """Whether a request that waits would run in the next step."""
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return False
        request = self.waiting[0]
        needed = self.cache.blocks_needed(request.id, request.longest)
        return needed <= self.cache.num_free_blocks

    def leave(self, request: Request) -> None:
        """Take a request out, finished or not, and give its blocks back."""
        self._leaving.append(request)
        self._empty()

    def _empty(self) -> None:
        """Let those go that are leaving. Where it was interrupted, it is done again."""
        while self._leaving:
            request = self._leaving[-1]
            for queue in (self.running, self.waiting):
                if request in queue:
                    queue.remove(request)
            if self.cache.blocks(request.id):
                self.cache.free(request.id)
            self._leaving.pop()

    def _admit(self) -> None:
        """In an order in which nothing is lost by an interrupt, and nothing done twice."""
        while self.can_admit:
            request = self.waiting[0]
            self.cache.reserve(request.id, request.longest)
            if request not in self.running:
                self.running.append(request)
            self.waiting.popleft()
