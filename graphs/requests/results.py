"""What callers get: results of requests, tokens of steps, errors."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from graphs.requests.requests import Request
from graphs.sampling.logprobs import unpacked


class RequestError(RuntimeError):
    """A request ended by an error of its own, which is the cause; others go on."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"request {request.id} has ended: {request.error}")
        self.request_id = request.id


class Logprob(NamedTuple):
    """A token's log-probability."""

    logprob: float  # natural logarithm
    rank: int  # 1 for the most likely token


def logprobs_of(token: int, row: np.ndarray) -> dict[int, Logprob]:
    """Log-probabilities by token: that of `token`, then of the most likely ones, in order."""
    ids, values = unpacked(row)
    found = {token: Logprob(values[0], ids[0])}
    for rank, (other, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
        found.setdefault(other, Logprob(value, rank))
    return found


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated for one prompt.

    The finish reason is "eos" after an eos token, "stop" after one of `stop_token_ids` or a string
    of `stop`, "length" after `max_new_tokens`, "max_tokens" where the session has no room for
    another token, "error" after an error of its own.
    """

    token_ids: list[int]  # without the prompt; ends with the token that stopped it, if one did
    finish_reason: str
    request: Request | None = dataclasses.field(default=None, repr=False, compare=False)

    # Cached: as `text`.
    @functools.cached_property
    def stop_reason(self) -> str | int | None:
        """The string or the token id of `stop`, `stop_token_ids` that ended it."""
        if self.finish_reason != "stop":
            return None
        text = None if self.request is None else self.request.text
        by_text = None if text is None else text.stop_reason
        return self.token_ids[-1] if by_text is None else by_text

    # Cached: as `text`.
    @functools.cached_property
    def prompt_token_ids(self) -> list[int]:
        if self.request is None or self.request.embeds is not None:
            return []
        return self.request.prompt

    # Cached: made once, where anybody asks. So are the others.
    @functools.cached_property
    def text(self) -> str | None:
        """The tokens as text, without eos and what follows a stop string; None: no tokenizer."""
        if self.request is None or self.request.tokenizer is None:
            return None
        if self.request.text is not None:
            return self.request.text.finish()
        return self.request.tokenizer.decode(self.request.text_ids, skip_special_tokens=True)

    # Cached: as `text`.
    @functools.cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """By token: the drawn token's, then those of the most likely ones; None: not asked for."""
        if self.request is None or self.request.sampling.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.request.logprobs, strict=True)
        return [logprobs_of(token, row) for token, row in pairs]

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the drawn tokens' log-probabilities; None: not asked for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(found[token].logprob for token, found in pairs)

    # Cached: as `text`.
    @functools.cached_property
    def weight_versions(self) -> list[int]:
        """Of each token, `DecodeSession.weight_version` when it was drawn."""
        marks = [] if self.request is None else self.request.versions
        found = [0] * len(self.token_ids)
        for begin, version in marks:
            found[begin:] = [version] * len(found[begin:])
        return found

    # Cached: as `text`.
    @functools.cached_property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The same of the prompt's tokens, None for the first; None: not asked for."""
        if self.request is None or self.request.scoring is None:
            return None
        rows = itertools.chain.from_iterable(self.request.scores)
        pairs = zip(self.request.scoring.given, rows, strict=True)
        return [None, *(logprobs_of(token, row) for token, row in pairs)]

    def __getstate__(self) -> dict[str, Any]:
        """What it says, without the request, which may hold what cannot be pickled."""
        names = ("stop_reason", "prompt_token_ids", "text", "logprobs", "prompt_logprobs")
        for name in (*names, "weight_versions"):
            getattr(self, name)
        return vars(self) | {"request": None}

    @classmethod
    def of(cls, request: Request) -> "Generation":
        """The result of a request that has ended."""
        assert request.finish_reason is not None, "it has ended"
        return cls(list(request.token_ids), request.finish_reason, request)


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """One request's new token in one step."""

    request_id: int
    token_id: int
    finish_reason: str | None  # that of `Generation` with the last token; None before
    text: str = ""  # of a request that streams: what is known of its text since the last output
    packed_logprobs: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def logprobs(self) -> dict[int, Logprob] | None:
        """As an entry of `Generation.logprobs`."""
        if self.packed_logprobs is None:
            return None
        return logprobs_of(self.token_id, self.packed_logprobs)
