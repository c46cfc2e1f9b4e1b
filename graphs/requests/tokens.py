"""Token ids as callers give them: checked, and as lists of ints."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

TOKENIZE = "tokenize first, e.g. tokenizer(text)['input_ids']"

TEMPLATE = "tokenize first, e.g. tokenizer.apply_chat_template(messages)['input_ids']"


def listed(name: str, values: Any, what: str) -> list[Any]:
    """`values` as a list, or a ValueError: no text, no mapping, nothing that has no entries."""
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError
        return list(values)
    except TypeError:  # of a tensor without dimensions too
        text = f"{name} must be a sequence of {what}, got {values!r:.80}{_advice(name, values)}"
        raise ValueError(text) from None


def _advice(name: str, values: Any) -> str:
    """What a caller does about text, a tokenizer's mapping, or a prompt without a list around."""
    if isinstance(values, Mapping) and "input_ids" in values:
        return "; give its 'input_ids'"
    if isinstance(values, Mapping) and "role" in values and name == "prompt":
        return f"; {TEMPLATE}"
    if isinstance(values, str | bytes) and name in ("prompt", "prompts"):
        return f"; {TOKENIZE}"
    if name == "prompt" and isinstance(values, int):
        return "; several prompts are a list of lists"
    return ""


def listed_ids(name: str, values: Any) -> list[Any]:
    """`values` as a list of what the caller gave: none, one token or several."""
    if values is None:
        return []
    single = isinstance(values, str | bytes) or not isinstance(values, Iterable)
    return [values] if single else listed(name, values, "token ids")


def ints(name: str, values: Any) -> list[int]:
    """`values` as ints; integer tensors and NumPy ints are taken too."""
    tokens = []
    for value in listed(name, values, "token ids"):
        try:
            tokens.append(operator.index(value))
        except TypeError:
            tokens.append(None)
        if tokens[-1] is None or isinstance(value, bool):
            advice = _advice(name, value) if not isinstance(value, int) else ""
            raise ValueError(f"{name} must hold ints, got {value!r}{advice}")
    return tokens


def token_ids(name: str, values: Any, vocab_size: int, *, ordered: bool = True) -> list[int]:
    """`values` as ints in the vocabulary."""
    if ordered and isinstance(values, set | frozenset):
        raise ValueError(f"{name} must have an order, got {values!r:.80}")
    tokens = ints(name, values)
    bad = next((t for t in tokens if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise ValueError(f"{name} must hold token ids from 0 to {vocab_size - 1}, got {bad}")
    return tokens
