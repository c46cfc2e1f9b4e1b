"""Forbids tokens and adds to logits, request by request, before penalties and filters.

R rows, S requests, V vocabulary, W words of 32 bits, B biases, K stop tokens.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from graphs.sampling.params import check_integer, check_real

BIASES = 1024
"""Tokens of a request that a bias can be given to."""


class Editing(IntEnum):
    """How a request edits its logits."""

    NONE = 0
    STATIC = 1
    """In all steps alike."""
    BY_TOKENS = 2
    """By the tokens so far: the host must have read them before what follows the model."""
    CALLED = 3
    """By Python code of the caller: such steps are not captured."""


@dataclasses.dataclass(frozen=True)
class Edits:
    """What a request forbids and prefers; checked.

    Attributes:
        allowed: [W] int32, a bit a token of the vocabulary: 1 where it may be drawn; None: all may,
            and there are no `bad_words`.
        bias: what is added to the logits of tokens.
        bad_words: sequences of several tokens of which the last may not follow the others.
        min_tokens: no token that ends the request is drawn among its first so many.
    """

    allowed: np.ndarray | None = None
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    bad_words: Sequence[tuple[int, ...]] = ()
    min_tokens: int = 0

    @property
    def kind(self) -> Editing:
        if self.bad_words:
            return Editing.BY_TOKENS
        static = self.allowed is not None or self.bias or self.min_tokens
        return Editing.STATIC if static else Editing.NONE

    # Cached: a step asks hundreds of requests.
    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest bad word but its last."""
        return max(map(len, self.bad_words), default=1) - 1

    def fill(self, row: np.ndarray, tokens: Sequence[int]) -> None:
        """Write what may follow the `longest` last tokens, or more, into a row [W] of bits."""
        row[:] = -1 if self.allowed is None else self.allowed
        for *before, last in self.bad_words:
            if list(tokens[len(tokens) - len(before) :]) == before:
                row[last // 32] &= ~np.int32(_bit(last))

    @classmethod
    def of(
        cls,
        vocab_size: int,
        *,
        logit_bias: Mapping[int, float] | None = None,
        bad_words: Sequence[Sequence[int]] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        min_tokens: int = 0,
    ) -> "Edits":
        """Edits from what a caller asks for, words as tokens.

        Raises:
            ValueError: a token is not in the vocabulary, a word is empty, there are more than
                `BIASES` biases, a bias is no number, or no token is left.
        """
        check_integer("min_tokens", min_tokens, 0, 2**31 - 1, supported="0 for off")
        bits_W, several = bits_of_all(vocab_size), []
        if allowed_token_ids is not None:
            kept = _tokens("allowed_token_ids", allowed_token_ids, vocab_size)
            bits_W = bits_of(kept, num_words(vocab_size))
        for word in bad_words or ():
            tokens = _tokens("bad_words", word, vocab_size)
            if len(tokens) > 1:
                several.append(tuple(tokens))
                continue
            bits_W[tokens[0] // 32] &= ~np.int32(_bit(tokens[0]))
        if not bits_W.any():
            raise ValueError(
                "allowed_token_ids and bad_words must leave a token that can be drawn, got none"
            )
        allowed_W = None if allowed_token_ids is None and not bad_words else bits_W
        return cls(allowed_W, _biases(logit_bias, vocab_size), tuple(several), min_tokens)


WIDTHS = (0, 32, BIASES)
"""Numbers of biases that steps have room for."""


def num_biases(number: int) -> int:
    """Room of a step whose requests give a bias to at most `number` tokens each."""
    return next(width for width in WIDTHS if width >= number)


def bits_of(tokens: Iterable[int], size: int) -> np.ndarray:
    """A row [size] of bits, those of the tokens set."""
    row = np.zeros(size, dtype=np.int32)
    for token in tokens:
        row[token // 32] |= np.int32(_bit(token))
    return row


def bits_of_all(vocab_size: int) -> np.ndarray:
    """A row [W] of bits, those of the vocabulary set and those behind it not."""
    row = np.full(num_words(vocab_size), -1, dtype=np.int32)
    if vocab_size % 32:
        row[-1] = (1 << vocab_size % 32) - 1
    return row


def num_words(vocab_size: int) -> int:
    """W."""
    return -(-vocab_size // 32)


def _bit(token: int) -> int:
    """The bit of a token in its word, as an int32 has it."""
    return (1 << token % 32) - ((token % 32 == 31) << 32)


def _tokens(name: str, values: Any, vocab_size: int) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"{name} must hold token ids, got {values!r:.80}")
    for token in values:
        check_integer(name, token, 0, vocab_size - 1, supported="token ids of the vocabulary")
    return [int(token) for token in values]


def _biases(logit_bias: Any, vocab_size: int) -> dict[int, float]:
    if logit_bias is None:
        return {}
    if not isinstance(logit_bias, Mapping) or len(logit_bias) > BIASES:
        raise ValueError(
            f"logit_bias must be a mapping of at most {BIASES} tokens to numbers, "
            f"got {logit_bias!r:.80}"
        )
    most = 1e6  # logits over a temperature stay finite
    for token, value in logit_bias.items():
        check_integer("logit_bias", token, 0, vocab_size - 1, supported="token ids as keys")
        check_real(f"logit_bias[{token}]", value, -most, most)
    return {int(token): float(value) for token, value in logit_bias.items()}


def edited(
    logits: torch.Tensor, tensors: Mapping[str, torch.Tensor], positions: torch.Tensor
) -> torch.Tensor:
    """Logits [R, V] in float32 after the edits of a step's tensors; can be captured.

    Args:
        logits: [R, V], any float dtype; not changed.
        tensors: allowed [R, W] int32; bias_ids [R, B] int64 and bias_values [R, B] float32, 0 where
            there is none; min_lengths [R] int64; stop_tokens [R, K] int64, -1 for none.
        positions: [R] int64, index of the drawn token in its sequence; before `min_lengths` no stop
            token is drawn.
    """
    compute = reference_allowed
    if logits.device.type == "cuda":
        from graphs.sampling.triton.edits import launch_allowed as compute
    logits_RV = compute(logits, tensors["allowed"])
    stop_RK = tensors["stop_tokens"]
    early_R1 = (positions < tensors["min_lengths"]).unsqueeze(1)
    forbidden_RK = torch.where(early_R1 & (stop_RK >= 0), -torch.inf, 0.0)
    logits_RV.scatter_add_(1, tensors["bias_ids"], tensors["bias_values"])
    # `where` gives torch's default dtype, which need not be float32.
    return logits_RV.scatter_add_(1, stop_RK.clamp(min=0), forbidden_RK.float())


def reference_allowed(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] in float32, -inf where the token's bit in `allowed` [R, W] is 0."""
    num_rows, vocab_size = logits.shape
    shift_32 = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits_RV = (allowed.unsqueeze(2) >> shift_32 & 1).view(num_rows, -1)[:, :vocab_size].bool()
    return logits.float().masked_fill(~bits_RV, -torch.inf)
