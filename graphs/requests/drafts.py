"""Drafts as callers give them, checked."""

from collections.abc import Mapping, Sequence

from graphs.requests.requests import Request, known_request
from graphs.requests.tokens import token_ids


def checked_drafts(
    drafts: Mapping[int, Sequence[int]],
    num_draft_tokens: int,
    requests: Mapping[int, Request],
    vocab_size: int,
) -> dict[int, list[int]]:
    """Drafts by request id as lists of tokens, without those of finished requests."""
    if num_draft_tokens < 1:
        raise ValueError("num_draft_tokens of the session must be at least 1 for drafts, got 0")
    if not isinstance(drafts, Mapping):
        raise ValueError(f"drafts must be a mapping of request ids to tokens, got {drafts!r:.80}")
    checked = {}
    for request_id, draft in drafts.items():
        if known_request("drafts", request_id, requests).finish_reason:
            continue
        tokens = token_ids(f"drafts[{request_id}]", draft, vocab_size)
        if len(tokens) > num_draft_tokens:
            raise ValueError(
                f"drafts[{request_id}] must hold at most num_draft_tokens={num_draft_tokens} "
                f"tokens, got {len(tokens)}"
            )
        checked[request_id] = tokens
    return checked
