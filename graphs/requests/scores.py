"""Scores: log-probabilities of given tokens, without drawing any."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from attn_ops.integrations.transformers.rotary import SHIFT
from graphs.requests.requests import Request, RequestBook, Scoring, check_length, checked_prompt
from graphs.requests.results import Logprob, logprobs_of
from graphs.requests.tokens import listed, token_ids, unpadded
from graphs.sampling import SamplingParams
from graphs.sampling.logprobs import MOST, unpacked
from graphs.sampling.params import check_integer

SCORED_BYTES = 2**29
"""Of logits of a step that scores prompts."""


def most_scored(vocab_size: int, dtype: torch.dtype) -> int:
    """Rows of prompts that a step scores, so that their logits take at most `SCORED_BYTES`."""
    return max(SCORED_BYTES // (vocab_size * dtype.itemsize) // 256 * 256, 64)  # whole tiles


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """Log-probabilities of the tokens of a continuation, or of a prompt but for its first token."""

    token_ids: list[int]
    logprobs: list[float]  # of each
    is_argmax: list[bool]  # whether no other token is likelier
    rows: np.ndarray = dataclasses.field(repr=False)  # of `packed`
    others: np.ndarray = dataclasses.field(repr=False)  # the same of `token_ids`

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Score) or self.token_ids != other.token_ids:
            return False
        return np.array_equal(self.rows, other.rows) and np.array_equal(self.others, other.others)

    @property
    def total(self) -> float:
        """The sum of `logprobs`: the log-probability of the whole."""
        return sum(self.logprobs)

    # Cached: made once, where anybody asks.
    @functools.cached_property
    def top_logprobs(self) -> list[dict[int, Logprob]]:
        """Of each token: its own, then those of the `logprobs=k` most likely ones."""
        return [logprobs_of(*pair) for pair in zip(self.token_ids, self.rows, strict=True)]

    # Cached: as `top_logprobs`.
    @functools.cached_property
    def of_token_ids(self) -> list[list[float]]:
        """Of each token: those of the `token_ids` that the caller named."""
        return unpacked(self.others)[1]

    @classmethod
    def of(cls, request: Request) -> "Score":
        """That of a request whose prompt is computed."""
        scoring = request.scoring
        assert scoring is not None, "it is scored"
        tokens = list(scoring.given[scoring.begin :])
        rows_RK = np.concatenate(request.scores)
        width = 1 + scoring.num_top
        ranks, values = unpacked(rows_RK[:, 0])
        is_argmax = [rank == 1 for rank in ranks]
        return cls(tokens, values, is_argmax, rows_RK[:, :width], rows_RK[:, width:])


def queue_scored(
    book: RequestBook,
    prompts: Iterable[Any],
    continuations: Iterable[Any] | None,
    num_top: int,
    others: Any,
) -> list[Request]:
    """Queue prompts whose tokens, or those of their continuations, are scored; all or none.

    Each request computes all of its tokens but the last, and draws one that nobody takes. Arguments
    as of `DecodeSession.score`.
    """
    limits, tokens_of = book.limits, book.tokens_of
    most = min(MOST, limits.vocab_size)
    check_integer("logprobs", num_top, 0, most, supported="0 for the given token alone")
    scoring = Scoring(0, (), num_top, tuple(token_ids("token_ids", others, limits.vocab_size)))
    heads = unpadded(tokens_of.prompts(prompts), frozenset(), frozenset())
    tails: list[Any] = [()] * len(heads)
    if continuations is not None:
        tails = listed(
            "continuations", tokens_of.prompts(continuations, special=False), "texts or token ids"
        )
    if len(tails) != len(heads):
        raise ValueError(f"continuations must be {len(heads)}, one a prompt, got {len(tails)}")
    requests = []
    for number, (head, tail) in enumerate(zip(heads, tails, strict=True), book.next_id):
        tokens = checked_prompt(head, limits)
        begin = 0 if continuations is None else len(tokens) - 1
        tokens += token_ids("continuations", tail, limits.vocab_size)
        if len(tokens) < begin + 2:
            what, got = ("prompts", head) if continuations is None else ("continuations", tail)
            raise ValueError(f"{what} must hold a token to score, got {got!r:.80}")
        prompt = checked_prompt(tokens[:-1], limits)
        check_length(prompt, 1, limits)
        sampling = SamplingParams(seed=0)
        nothing: frozenset[int] = frozenset()
        request = Request(number, prompt, 1, sampling, nothing, nothing, limits.max_tokens)
        request.scoring = scoring._replace(begin=begin, given=tokens[1:])
        if limits.rope_boundary is not None and len(prompt) > limits.rope_boundary:
            request.shift = SHIFT
        requests.append(request)
    return book.queue(requests)
