"""A request's part of a step, and where launched steps leave their requests.

The host knows lengths before it knows tokens. So a step may be scheduled while the tokens of the
step before are still drawn: such a row takes its last token on the device.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np

from graphs.requests.requests import FAR, PACKED, Request
from graphs.sampling.edits import Editing
from graphs.sampling.params import Sampling


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


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """Fields of `Scheduled` of S rows, but for drafts: arrays [S], int64 or bool."""

    requests: list[Request]
    packed: np.ndarray  # what of the requests never changes: `PACKED`
    num_tokens: np.ndarray
    num_computed: np.ndarray
    lengths: np.ndarray
    wants_token: np.ndarray
    rooms: np.ndarray
    sources: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Scheduled]) -> "Columns":
        requests = [s.request for s in rows]
        return cls(
            requests,
            packed_of(requests),
            np.array([s.num_tokens for s in rows], dtype=np.int64),
            np.array([s.num_computed for s in rows], dtype=np.int64),
            np.array([s.length for s in rows], dtype=np.int64),
            np.array([s.wants_token for s in rows], dtype=bool),
            np.array([s.room for s in rows], dtype=np.int64),
            np.array([s.source for s in rows], dtype=np.int64),
        )

    # Cached: launches in a row ask again and again.
    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Most tokens of each request, prompt and output."""
        return self.packed["end"]

    def rows(self) -> list[Scheduled]:
        numbers = (self.num_tokens, self.num_computed, self.lengths, self.wants_token,
                   self.rooms, self.sources)  # fmt: skip
        return list(map(Scheduled, self.requests, *(column.tolist() for column in numbers)))


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """What the host knows of S requests that run: arrays [S]."""

    requests: list[Request]
    packed: np.ndarray  # `PACKED`
    lengths: np.ndarray  # of the prompt and all tokens that were read
    rooms: np.ndarray  # tokens that their blocks hold

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Known":
        packed = packed_of(requests)
        drawn = numbers_of(map(len, map(_TOKENS, requests)), requests)
        lengths, rooms = packed["prompt"] + drawn, numbers_of(map(_ROOM, requests), requests)
        return cls(list(requests), packed, lengths, rooms)


_TOKENS, _ROOM, _COMPUTED = map(operator.attrgetter, ("token_ids", "room", "num_computed"))


def numbers_of(numbers: Iterable[int], requests: Sequence[Request]) -> np.ndarray:
    """[S] int64, one of each request."""
    return np.fromiter(numbers, np.int64, len(requests))


def packed_of(requests: Sequence[Request]) -> np.ndarray:
    """[S] of `PACKED`."""
    return np.frombuffer(b"".join([r.packed for r in requests]), dtype=PACKED)


class Rows(Sequence[Scheduled]):
    """The requests of a step, a row of the batch each; it does not change.

    It is made of `Scheduled` or of `Columns`; the other is made when somebody asks for it.

    Attributes:
        num_released: `Reservations.num_released` when the step was scheduled.
        shared: prefixes that are attended to apart, a `SharedPrefixes`; None: there are none.
    """

    def __init__(self, rows: Iterable[Scheduled] | Columns = (), num_released: int = 0) -> None:
        self.num_released = num_released
        self.shared: Any = None
        if isinstance(rows, Columns):
            self.columns = rows
        else:
            self._rows = list(rows)

    # Cached: made once, where anybody asks.
    @functools.cached_property
    def columns(self) -> Columns:
        return Columns.of(self._rows)

    # Cached: as `columns`.
    @functools.cached_property
    def _rows(self) -> list[Scheduled]:
        return self.columns.rows()

    @overload
    def __getitem__(self, index: int) -> Scheduled: ...

    @overload
    def __getitem__(self, index: slice) -> list[Scheduled]: ...

    def __getitem__(self, index: int | slice) -> Scheduled | list[Scheduled]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def requests(self) -> list[Request]:
        return self.columns.requests

    # Cached: launches in a row ask again and again. So are the others.
    @functools.cached_property
    def num_tokens(self) -> int:
        """Of all rows."""
        return int(self.columns.num_tokens.sum())

    # Cached: as `num_tokens`.
    @functools.cached_property
    def num_draft(self) -> int:
        """Tokens of the first row's draft."""
        return len(self._rows[0].draft) if "_rows" in self.__dict__ else 0

    # Cached: as `num_tokens`.
    @functools.cached_property
    def query_len(self) -> int | None:
        """Tokens of every request, where all want one of every token; None: of a mixed step."""
        number, columns = 1 + self.num_draft, self.columns
        same = (columns.num_tokens == number).all() and columns.wants_token.all()
        return number if same else None

    # Cached: as `num_tokens`.
    @functools.cached_property
    def embeds(self) -> list[tuple[int, int, int, Any]]:
        """Prompts of embeddings, of which the step computes rows; see `fill_embeds`."""
        columns = self.columns
        if not (columns.num_computed < columns.packed["prompt"]).any():
            return []
        found, begin = [], 0
        for s in self:
            end = min(s.num_computed + s.num_tokens, len(s.request.prompt))
            if s.request.embeds is not None and s.num_computed < end:
                found.append((begin, s.num_computed, end, s.request.embeds))
            begin += s.num_tokens
        return found

    # Cached: as `num_tokens`.
    @functools.cached_property
    def any_logits(self) -> bool:
        """Whether any row wants a token."""
        return bool(self.columns.wants_token.any())

    # Cached: as `num_tokens`.
    @functools.cached_property
    def kind(self) -> Sampling:
        """The strongest that a request wants."""
        return Sampling(int(self.columns.packed["kind"].max()))

    # Cached: as `num_tokens`.
    @functools.cached_property
    def logprobs(self) -> int:
        """The most likely tokens that a request wants log-probabilities of; -1: none at all."""
        return int(self.columns.packed["logprobs"].max()) if self.any_logits else -1

    # Cached: as `num_tokens`.
    @functools.cached_property
    def editing(self) -> Editing:
        """How logits are edited, at most."""
        if not self.any_logits:
            return Editing.NONE
        return Editing(int(self.columns.packed["editing"].max()))

    # Cached: as `num_tokens`.
    @functools.cached_property
    def num_biases(self) -> int:
        """Tokens to which a request gives a bias, at most."""
        return int(self.columns.packed["num_biases"].max())

    # Cached: as `num_tokens`.
    @functools.cached_property
    def num_logits(self) -> np.ndarray | None:
        """[S]: rows of logits of each request, where prompts are scored; None: none is.

        They are its last ones, and one at least.
        """
        columns = self.columns
        begin, end = columns.packed["scored"].T
        ends = columns.num_computed + columns.num_tokens
        first = np.maximum(columns.num_computed, begin)
        if not ((first < ends) & (first < end)).any():
            return None
        return np.maximum(ends - first, 1)

    def logits_rows(self, start: np.ndarray) -> np.ndarray:
        """[R]: rows of the batch whose logits are wanted; `start` [S + 1]: first row of each."""
        if self.num_logits is None:
            return start[1:] - 1
        ends = np.cumsum(self.num_logits)
        return np.arange(ends[-1]) + np.repeat(start[1:] - ends, self.num_logits)

    def given(self) -> tuple[np.ndarray, int, np.ndarray]:
        """Of rows of logits [R]: the tokens that follow, most likely ones beside, others [R, M].

        Rows that are not scored have token 0.
        """
        assert self.num_logits is not None, "something is scored"
        scorings = [r.scoring for r in self.requests if r.scoring is not None]
        given = np.zeros(self.num_logits.sum(), dtype=np.int64)
        others = np.zeros((given.size, max(len(s.token_ids) for s in scorings)), dtype=np.int64)
        ends = np.cumsum(self.num_logits).tolist()
        for s, count, end in zip(self, self.num_logits.tolist(), ends, strict=True):
            if (scoring := s.request.scoring) is None:
                continue
            first = s.num_computed + s.num_tokens - count
            tokens = scoring.given[first : first + count]
            given[end - count : end - count + len(tokens)] = tokens
            others[end - count : end, : len(scoring.token_ids)] = scoring.token_ids
        return given, max(s.num_top for s in scorings), others

    # Cached: as `num_tokens`.
    @functools.cached_property
    def takes_tokens(self) -> bool:
        """Whether a row takes its token from the step before."""
        return bool((self.columns.sources >= 0).any())

    # Cached: as `num_tokens`.
    @functools.cached_property
    def remaining(self) -> np.ndarray:
        """[S]: tokens that each request may still get, from this step on."""
        return self.columns.ends - self.columns.lengths

    # Cached: as `num_tokens`.
    @functools.cached_property
    def least(self) -> int:
        """Fewest tokens that one of the requests may still get."""
        return int(self.remaining.min())

    # Cached: as `num_tokens`.
    @functools.cached_property
    def most(self) -> int:
        """Most tokens of them."""
        return int(self.remaining.max())

    # Cached: as `num_tokens`.
    @functools.cached_property
    def reach(self) -> int:
        """Decode steps from this one on that the blocks of all requests hold."""
        columns = self.columns
        whole = columns.rooms >= columns.ends - 1
        return int(np.where(whole, FAR, columns.rooms - columns.lengths + 1).min())


class After:
    """Lengths of requests after launched steps, whether or not their tokens were read.

    Args:
        rows: of the first of the steps.
        num_steps: steps; the rows of more than one are decodes.
    """

    def __init__(self, rows: Sequence[Scheduled] = (), num_steps: int = 1) -> None:
        self._scheduled = rows if isinstance(rows, Rows) else Rows(rows)
        self.num_steps = num_steps

    # Cached: nobody asks for it while the batch stays as it is. So are the others.
    @functools.cached_property
    def _row_of(self) -> dict[Request, int]:
        return {request: row for row, request in enumerate(self._scheduled.requests)}

    # Cached: as `_row_of`.
    @functools.cached_property
    def _computed(self) -> np.ndarray:
        columns = self._scheduled.columns
        return columns.num_computed + columns.num_tokens + (self.num_steps - 1)

    # Cached: as `_row_of`.
    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        columns = self._scheduled.columns
        return columns.lengths + columns.wants_token + (self.num_steps - 1)

    # Cached: as `_row_of`.
    @functools.cached_property
    def _ended(self) -> frozenset[Request]:
        ended = (self._lengths >= self._scheduled.columns.ends).tolist()
        return frozenset(itertools.compress(self._scheduled.requests, ended))

    def __contains__(self, request: Request) -> bool:
        return request in self._row_of

    def place(self, request: Request) -> tuple[int, int, int]:
        """`num_computed`, `length` and `source` of the request in the next step."""
        row, known = self._row_of.get(request), request.num_tokens
        if row is None:
            return request.num_computed, known, -1
        length = int(self._lengths[row])
        return int(self._computed[row]), length, -1 if length == known else row

    def places(
        self, requests: Sequence[Request], known: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`place` of every request, whose `known` tokens [S] the host has: three arrays [S]."""
        computed = numbers_of(map(_COMPUTED, requests), requests)
        sources = np.full(len(requests), -1, dtype=np.int64)
        if not self._scheduled:
            return computed, known, sources
        lengths, nowhere = known.copy(), itertools.repeat(-1)
        found = numbers_of(map(self._row_of.get, requests, nowhere), requests)
        (launched,) = np.nonzero(found >= 0)
        rows = found[launched]
        computed[launched] = self._computed[rows]
        lengths[launched] = self._lengths[rows]
        sources[launched] = np.where(lengths[launched] == known[launched], -1, rows)
        return computed, lengths, sources

    def has_ended(self, request: Request) -> bool:
        """Whether the request gets its last possible token in the launched steps."""
        return request in self._ended

    def num_ended(self, requests: Sequence[Request]) -> int:
        """How many of the requests have."""
        if not self._scheduled or self._scheduled.least > self.num_steps:
            return 0  # told once for all
        return sum(map(self.has_ended, requests))


NOTHING = After()
"""Nothing is launched: the host knows all."""
