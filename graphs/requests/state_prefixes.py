"""Prefixes that requests of models with states share: prompts begin where a state is kept too.

    waiting request -> find, no further than a checkpoint -> copy its state -> plan others

Generated tokens are not found: a state may depend on where the prompt ends (`prompt_dt`).
"""

from collections.abc import Iterable, Sequence

from attn_ops import PagedKVCache
from attn_ops.prefixes import NO_MATCH, Key, Match
from attn_ops.states import StatePool
from graphs.requests.batch import After
from graphs.requests.checkpoints import Checkpoints
from graphs.requests.prefixes import PrefixSharing, Watched
from graphs.requests.requests import Request


class StatePrefixSharing(PrefixSharing):
    """`PrefixSharing` where layers keep states.

    Args:
        cache: of all requests.
        weights: of the model; None: nothing is shared.
        states: that the layers keep.
    """

    def __init__(self, cache: PagedKVCache, weights: Watched | None, states: StatePool) -> None:
        super().__init__(cache, weights)
        self.checkpoints = Checkpoints(states)

    def forget(self) -> None:
        super().forget()
        self.checkpoints.forget()

    def find(self, request: Request) -> Match:
        """What the cache holds of a prompt, as far as a state behind it is kept."""
        match = super().find(request)
        if not match.blocks or match.window_blocks is not None:
            return NO_MATCH  # blocks of windows that a shorter match needs may be gone
        keys = self._keys(request)[: len(request.prompt) // self.cache.block_size]
        number = self.checkpoints.find(keys[: len(match.blocks)])
        return Match(match.blocks[:number], number * self.cache.block_size)

    def awaits(self, request: Request, match: Match, promised: dict[Key, int]) -> bool:
        """Whether an older request is about to keep a state behind more of the prompt's blocks."""
        is_on = self.is_on and request.share_prefix
        return is_on and self.checkpoints.awaits(request, self._reached(request), len(match.blocks))

    def admit(self, request: Request, match: Match) -> None:
        """The request goes on from the state behind what was found; plan which others to keep."""
        super().admit(request, match)
        request.num_seen = match.num_tokens
        if not (self.is_on and request.share_prefix) or self.cache.window_pool is not None:
            return
        keys, size = self._reached(request), self.cache.block_size
        if match.blocks:
            self.checkpoints.use(request.id, self._keys(request)[len(match.blocks) - 1])
        held = self.cache.match(request.prompt[: len(keys) * size], keys).blocks
        for number in sorted({len(held), len(keys)}):
            if number > len(match.blocks):
                self.checkpoints.plan(request, keys, number, size)

    def keep_prompts(self, running: Iterable[Request], after: After) -> None:
        running = list(running)
        super().keep_prompts(running, after)
        for request in running:
            self._keep_states(request, after.place(request)[0])

    def keep_all(self, request: Request) -> None:
        super().keep_all(request)
        self._keep_states(request, request.num_computed)
        self.checkpoints.drop(request)

    def _keep(self, request: Request, num_tokens: int) -> None:
        super()._keep(request, min(num_tokens, len(request.prompt)))

    def _keep_states(self, request: Request, num_computed: int) -> None:
        if request.checkpoints and request.begun_at == self.num_forgotten:
            self.checkpoints.keep(request, num_computed)

    def _reached(self, request: Request) -> Sequence[Key]:
        """Keys of the full blocks before its prompt's last token, or the first that is scored."""
        last = min(len(request.prompt) - 1, request.first_unscored())
        return self._keys(request)[: last // self.cache.block_size]
