"""A request's part of a step, and where launched steps leave their requests.

The host knows lengths before it knows tokens. So a step may be scheduled while the tokens of the
step before are still drawn: such a row takes its last token on the device.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from graphs.requests.requests import Request
from graphs.sampling.params import Sampling

FAR = 2**31
"""More steps than a request takes."""


@dataclasses.dataclass(slots=True, eq=False)
class Scheduled:
    """One request's part of a step."""

    request: Request
    num_tokens: int
    num_computed: int  # tokens before these; they are in the cache when the step runs
    length: int  # of the prompt and all tokens drawn before, also those that the host has not read
    wants_token: bool  # it ends at the last of those, whose logits are sampled
    room: int  # tokens that its blocks hold
    source: int = -1  # row of the step before that draws its last token; -1: the host knows it
    row: int = 0  # of the batch
    draft: tuple[int, ...] = ()  # after the last known token, and counted in num_tokens

    def tokens(self) -> list[int]:
        """The step's tokens of the request; 0 where the device has the token."""
        begin = self.num_computed
        if self.source >= 0:
            return [0]
        end = begin + self.num_tokens - len(self.draft)
        return [*self.request.tokens(begin, end), *self.draft]

    @property
    def remaining(self) -> int:
        """Tokens that the request may still get, from this step on."""
        return self.request.end - self.length

    @property
    def reach(self) -> int:
        """Decode steps from this one on that its blocks hold."""
        return FAR if self.room >= self.request.longest else self.room - self.length + 1


class Rows(list[Scheduled]):
    """The requests of a step, a row of the batch each; not changed once it is asked anything.

    Attributes:
        num_released: `Reservations.num_released` when the step was scheduled.
        shared: prefixes that are attended to apart, a `SharedPrefixes`; None: there are none.
    """

    num_released = 0
    shared: Any = None

    # Cached: launches in a row ask again and again.
    @functools.cached_property
    def requests(self) -> list[Request]:
        return [s.request for s in self]

    # Cached: as `requests`.
    @functools.cached_property
    def num_tokens(self) -> int:
        """Of all rows."""
        return sum([s.num_tokens for s in self])

    # Cached: as `requests`.
    @functools.cached_property
    def query_len(self) -> int | None:
        """Tokens of every request, where all want one of every token; None: of a mixed step."""
        number = 1 + len(self[0].draft)
        same = all(s.num_tokens == number and s.wants_token for s in self)
        return number if same else None

    # Cached: as `requests`.
    @functools.cached_property
    def any_logits(self) -> bool:
        """Whether any row wants a token."""
        return any(s.wants_token for s in self)

    # Cached: as `requests`.
    @functools.cached_property
    def kind(self) -> Sampling:
        """The strongest that a request wants."""
        return max([s.request.sampling.kind for s in self])

    # Cached: as `requests`.
    @functools.cached_property
    def takes_tokens(self) -> bool:
        """Whether a row takes its token from the step before."""
        return any(s.source >= 0 for s in self)

    # Cached: as `requests`.
    @functools.cached_property
    def least(self) -> int:
        """Fewest tokens that one of the requests may still get."""
        return min([s.request.end - s.length for s in self])

    # Cached: as `requests`.
    @functools.cached_property
    def reach(self) -> int:
        """Decode steps from this one on that the blocks of all requests hold."""
        return min([s.reach for s in self])

    # Cached: as `requests`.
    @functools.cached_property
    def most(self) -> int:
        """Most tokens of them."""
        return max([s.request.end - s.length for s in self])


class After:
    """Lengths of requests after launched steps, whether or not their tokens were read.

    Args:
        rows: of the first of the steps.
        num_steps: steps; the rows of more than one are decodes.
    """

    def __init__(self, rows: Sequence[Scheduled] = (), num_steps: int = 1) -> None:
        self._scheduled = rows if isinstance(rows, Rows) else Rows(rows)
        self.num_steps = num_steps

    # Cached: nobody asks for it while the batch stays as it is.
    @functools.cached_property
    def _rows(self) -> dict[Request, Scheduled]:
        return {s.request: s for s in self._scheduled}

    def __contains__(self, request: Request) -> bool:
        return request in self._rows

    def place(self, request: Request) -> tuple[int, int, int]:
        """`num_computed`, `length` and `source` of the request in the next step."""
        return next(self.places([request]))

    def places(self, requests: Sequence[Request]) -> Iterator[tuple[int, int, int]]:
        """`place` of every request."""
        find, more = self._rows.get, self.num_steps - 1
        for request in requests:
            s = find(request)
            known = len(request.prompt) + len(request.token_ids)
            if s is None:
                yield request.num_computed, known, -1
            else:
                length = s.length + s.wants_token + more
                yield s.num_computed + s.num_tokens + more, length, -1 if length == known else s.row

    def has_ended(self, request: Request) -> bool:
        """Whether the request gets its last possible token in the launched steps."""
        s = self._rows.get(request)
        return s is not None and s.length + s.wants_token + self.num_steps - 1 >= request.end

    def num_ended(self, requests: Sequence[Request]) -> int:
        """How many of the requests have."""
        if not self._scheduled or self._scheduled.least > self.num_steps:
            return 0  # told once for all
        return sum(map(self.has_ended, requests))


NOTHING = After()
"""Nothing is launched: the host knows all."""
