"""A request's part of a step, and where launched steps leave their requests.

The host knows lengths before it knows tokens. So a step may be scheduled while the tokens of the
step before are still drawn: such a row takes its last token on the device.
"""

import dataclasses
import functools
from collections.abc import Sequence

from graphs.requests.requests import Request


@dataclasses.dataclass(slots=True, eq=False)
class Scheduled:
    """One request's part of a step."""

    request: Request
    num_tokens: int
    num_computed: int  # tokens before these; they are in the cache when the step runs
    length: int  # of the prompt and all tokens drawn before, also those that the host has not read
    source: int = -1  # row of the step before that draws its last token; -1: the host knows it
    row: int = 0  # of the batch
    draft: tuple[int, ...] = ()  # after the last known token, and counted in num_tokens
    reach: int = 1  # decode steps from this one on that its blocks hold

    def tokens(self) -> list[int]:
        """The step's tokens of the request; 0 where the device has the token."""
        begin = self.num_computed
        if self.source >= 0:
            return [0]
        end = begin + self.num_tokens - len(self.draft)
        return [*self.request.tokens(begin, end), *self.draft]

    @property
    def wants_token(self) -> bool:
        """Whether this step ends at the request's last token, whose logits are sampled."""
        return self.num_computed + self.num_tokens - len(self.draft) == self.length

    @property
    def remaining(self) -> int:
        """Tokens that the request may still get, from this step on."""
        return self.request.end - self.length


class After:
    """Lengths of requests after launched steps, whether or not their tokens were read.

    Args:
        rows: of the first of the steps.
        num_steps: steps; the rows of more than one are decodes.
    """

    def __init__(self, rows: Sequence[Scheduled] = (), num_steps: int = 1) -> None:
        self._scheduled, self.num_steps = rows, num_steps

    # Cached: nobody asks for it while the batch stays as it is.
    @functools.cached_property
    def _rows(self) -> dict[Request, Scheduled]:
        return {s.request: s for s in self._scheduled}

    def __contains__(self, request: Request) -> bool:
        return request in self._rows

    def place(self, request: Request) -> tuple[int, int, int]:
        """`num_computed`, `length` and `source` of the request in the next step."""
        s = self._rows.get(request)
        if s is None:
            return request.num_computed, request.num_tokens, -1
        length = s.length + s.wants_token + self.num_steps - 1
        num_computed = s.num_computed + s.num_tokens + self.num_steps - 1
        return num_computed, length, -1 if length == request.num_tokens else s.row

    def has_ended(self, request: Request) -> bool:
        """Whether the request gets its last possible token in the launched steps."""
        return request in self._rows and self.place(request)[1] >= request.end


NOTHING = After()
"""Nothing is launched: the host knows all."""
