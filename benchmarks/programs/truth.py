"""What a model computes by itself, one prompt at a time, and whether a session's tokens are that.

V vocabulary.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

NEAR = 1e-4
"""Logits closer to the largest than this, relative to the largest magnitude, may be drawn too."""

Rows = Callable[[int], torch.Tensor]
"""[V] logits behind so many tokens."""


class BadTruth(Exception):
    """The model cannot be run by itself, or its logits are not finite."""


def recomputed(model: Any, ids: Sequence[int]) -> Rows:
    """The whole sequence anew for every token, without a cache.

    With a mask, as `generate` gives one: without, Transformers takes positions that do not rise by
    one for several sequences.
    """

    def row(num_tokens: int) -> torch.Tensor:
        ids_1T = torch.tensor([ids[:num_tokens]])
        with torch.no_grad():
            logits = model(
                input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False
            ).logits
        if logits.shape[1] != num_tokens:
            raise BadTruth(f"{logits.shape[1]} rows of logits for {num_tokens} tokens")
        return _finite(logits[0, -1])

    return row


def switched(old: Any, new: Any, ids: Sequence[int], at: int, around: Any) -> Rows:
    """The first `at` tokens by the old model, the rest by the new one over the old one's cache."""
    from transformers import DynamicCache

    cache, parts = DynamicCache(), []
    with torch.no_grad():
        if at:
            first = torch.tensor([ids[:at]])
            parts.append(old(input_ids=first, past_key_values=cache, use_cache=True).logits[0])
            if cache.get_seq_length() != at:  # Transformers takes masks from the first layer's
                raise BadTruth("the first layer keeps no keys")
        if at < len(ids):
            rest = torch.tensor([ids[at:]])
            positions = torch.arange(at, len(ids))[None]  # a skipped first layer counts none
            with around():
                out = new(
                    input_ids=rest, position_ids=positions, past_key_values=cache, use_cache=True
                )
            parts.append(out.logits[0])
    logits = torch.cat(parts)
    return lambda num_tokens: _finite(logits[num_tokens - 1])


def first_wrong(
    rows: Rows, prompt: Sequence[int], tokens: Sequence[int], begin: int = 0, near: float = NEAR
) -> tuple[int, int] | None:
    """(index, expected) of the first token from `begin` on that is not the largest logit's."""
    for i in range(begin, len(tokens)):
        logits_V = rows(len(prompt) + i)
        top = int(logits_V.argmax())
        if tokens[i] == top:
            continue
        in_range = 0 <= tokens[i] < logits_V.shape[0]
        gap = float(logits_V[top] - logits_V[tokens[i]]) if in_range else float("inf")
        if gap > near * float(logits_V.abs().max()):
            return i, top
    return None


def unstable(make: Callable[[], Any], ids: Sequence[int], expected: int) -> bool:
    """Whether weights off by 1e-6 draw another token behind `ids`: an expert's near tie, say."""
    for seed in range(3):
        model = make()
        torch.manual_seed(seed)
        for p in model.parameters():
            p.data = p.data * (1 + 2e-6 * torch.randn(p.shape))
        if int(recomputed(model, ids)(len(ids)).argmax()) != expected:
            return True
    return False


def _finite(logits_V: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(logits_V).all():
        raise BadTruth("logits are not finite")
    return logits_V.float()


plain = contextlib.nullcontext
