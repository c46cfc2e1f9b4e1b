"""What a request must look like: checked once, before anything is queued."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphs.modes import Sampling
from graphs.sampling import SamplingParams
from graphs.scheduler import Request


def checked_request(
    request_id: int,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams,
    eos: int | Iterable[int] | None,
    *,
    vocab_size: int,
    max_tokens: int,
    cache_tokens: int,
) -> Request:
    """A request, or a ValueError that names the argument, its value and what is supported.

    Args:
        vocab_size: token ids are from 0 to `vocab_size - 1`.
        max_tokens: the longest prompt, and the most tokens of a request in the cache.
        cache_tokens: tokens that the empty cache holds.
    """
    tokens = token_ids("prompt", prompt, vocab_size)
    if not tokens:
        raise ValueError("prompt must hold at least one token, got an empty one")
    if len(tokens) > max_tokens:
        raise ValueError(
            f"prompt must be at most max_tokens={max_tokens} long, got {len(tokens)} tokens"
        )
    check_positive(max_new_tokens=max_new_tokens)
    stops = frozenset(token_ids("eos", stop_list(eos), vocab_size))
    request = Request(request_id, tokens, max_new_tokens, sampling, stops, max_tokens)
    if request.longest > cache_tokens:
        raise ValueError(
            f"prompt and max_new_tokens must fit into the cache of {cache_tokens} tokens, "
            f"got {len(tokens)} and {max_new_tokens}"
        )
    return request


def checked_drafts(
    drafts: Mapping[int, Sequence[int]],
    num_draft_tokens: int,
    requests: Mapping[int, Request],
    vocab_size: int,
) -> dict[int, list[int]]:
    """Drafts by request id as lists of tokens, or a ValueError."""
    if num_draft_tokens < 1:
        raise ValueError("num_draft_tokens of the session must be at least 1 for drafts, got 0")
    checked = {}
    for request_id, draft in drafts.items():
        if request_id not in requests:
            raise ValueError(f"drafts must be for requests of this session, got {request_id!r}")
        tokens = token_ids(f"drafts[{request_id}]", draft, vocab_size)
        if len(tokens) > num_draft_tokens:
            raise ValueError(
                f"drafts[{request_id}] must hold at most num_draft_tokens={num_draft_tokens} "
                f"tokens, got {len(tokens)}"
            )
        checked[request_id] = tokens
    penalized = next(
        (r.id for r in requests.values() if r.sampling.kind is Sampling.PENALIZED), None
    )
    if penalized is not None:
        raise ValueError(
            "penalties must be neutral with drafts, as they change from token to token, "
            f"got some for request {penalized}"
        )
    return checked


def stop_list(eos: Any) -> list[Any]:
    """`eos` as a list of what the caller gave: none, one token or several."""
    if eos is None:
        return []
    return list(eos) if isinstance(eos, Iterable) and not isinstance(eos, str) else [eos]


def token_ids(name: str, values: Iterable[Any], vocab_size: int) -> list[int]:
    """`values` as ints in the vocabulary; integer tensors and NumPy ints are taken too."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence of token ids, got {values!r}")
    tokens = []
    for value in values:
        try:
            tokens.append(operator.index(value))
        except TypeError:
            raise ValueError(f"{name} must hold ints, got {value!r}") from None
    bad = next((t for t in tokens if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise ValueError(f"{name} must hold token ids from 0 to {vocab_size - 1}, got {bad}")
    return tokens


def check_positive(**arguments: int) -> None:
    """Raise a ValueError for the first argument that is no positive int."""
    for name, value in arguments.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")
