"""What a request asks of sampling, checked, and as the tensors of a step."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from graphs.sampling.logprobs import MOST


class Sampling(IntEnum):
    """What a step's sampling computes; each kind can do what those below it can.

    It decides which kernels are launched, so it is part of a graph's key.
    """

    GREEDY = 0
    """The largest logit."""
    RANDOM = 1
    """Draws at a temperature."""
    FILTERED = 2
    """Also top-k, top-p and min-p."""
    PENALIZED = 3
    """Also penalties on tokens that came before."""


FIELDS: dict[str, tuple[torch.dtype, float | int]] = {
    "temperature": (torch.float32, 0.0),
    "top_k": (torch.int32, 0),
    "top_p": (torch.float32, 1.0),
    "min_p": (torch.float32, 0.0),
    "repetition_penalty": (torch.float32, 1.0),
    "presence_penalty": (torch.float32, 0.0),
    "frequency_penalty": (torch.float32, 0.0),
    "seed": (torch.int64, 0),
}
"""Tensors [S] of a step: dtype, and the value of padding rows, with which a field does nothing."""

OF_REQUESTS = (
    "max_new_tokens", "eos", "eos_token_id", "ignore_eos", "stop_token_ids", "stop",
    "include_stop_str_in_output", "min_tokens", "logit_bias", "bad_words", "allowed_token_ids",
    "structured_outputs", "logits_processor", "prompt_logprobs", "stream", "share_prefix", "n",
    "generation_config",
)  # fmt: skip
"""What else a request takes by name."""

SEEDS = (-(2**63), 2**63 - 1)
TOP_KS = (0, 2**31 - 1)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        temperature: 0 takes the most likely token, t > 0 draws from softmax(logits / t). Below
            1e-5 it acts as 1e-5.
        top_k: draw among the k most likely tokens and those as likely as the k-th; 0 is off.
        top_p: draw among the fewest most likely tokens that have this much of the probability
            that top_k left, and those as likely as the last of them; 1 is off.
        min_p: draw among tokens at least this many times as likely as the likeliest; 0 is off.
        repetition_penalty: logits of tokens in the prompt or the output are divided by it where
            positive, else multiplied (arXiv:1909.05858); 1 is off.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: the same, for every time that the token is in the output.
        seed: of the request's random numbers; None leaves the choice to the session.
        logprobs: log-probabilities of every drawn token and of the k most likely ones, 0 to 64;
            None: none.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        most = torch.finfo(torch.float32).max  # what the step's tensors can hold
        check_real("temperature", self.temperature, 0.0, most)
        check_integer(
            "top_k", self.top_k, *TOP_KS, supported="0 for off, k for the k most likely tokens"
        )
        check_real("top_p", self.top_p, 0.0, 1.0, exclusive=True)
        check_real("min_p", self.min_p, 0.0, 1.0)
        check_real("repetition_penalty", self.repetition_penalty, 0.0, most, exclusive=True)
        check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.logprobs is not None:
            supported = f"None for none, 0 for the drawn token alone, 1 to {MOST}"
            check_integer("logprobs", self.logprobs, 0, MOST, supported=supported)
        if self.seed is not None:
            check_integer("seed", self.seed, *SEEDS, supported="integers of 64 bits, None for any")

    # Cached: a step asks hundreds of requests, 0.3 us each.
    @functools.cached_property
    def kind(self) -> Sampling:
        """The weakest kind of step that is enough for this request."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        if penalties != (1, 0, 0):
            return Sampling.PENALIZED
        if self.temperature == 0:
            return Sampling.GREEDY  # filters keep the most likely token
        if self.top_k > 0 or self.top_p < 1 or self.min_p > 0:
            return Sampling.FILTERED
        return Sampling.RANDOM

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "SamplingParams":
        """The parameters from fields by name.

        Raises:
            ValueError: there is no field of a name, or a value is out of range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = next((name for name in fields if name not in names), None)
        if unknown is not None:
            known = ", ".join((*names, *OF_REQUESTS))
            advice = {
                "do_sample": "; temperature=0 is greedy, above 0 draws",
                "attention_mask": "; prompts may be a tokenizer's mapping, which has it",
            }.get(unknown, "")
            raise ValueError(
                f"sampling parameters must be known, got {unknown}; supported: {known}{advice}"
            )
        return cls(**fields)

    def values(self, default_seed: int = 0) -> tuple[float | int, ...]:
        """One value for each of `FIELDS`, in order."""
        seed = default_seed if self.seed is None else self.seed
        return (*(getattr(self, name) for name in FIELDS if name != "seed"), seed)


def check_real(name: str, value: Any, low: float, high: float, *, exclusive: bool = False) -> None:
    """`exclusive`: `low` itself is refused, and what becomes it in float32."""
    number = type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
    comparable: Any = value  # as it is: an int may be too large for a float
    number = number and low <= comparable <= high  # NaN is not
    if not number or (exclusive and np.float32(value) == low):
        supported = f"{'above' if exclusive else 'from'} {low:g} to {high:g}, in float32"
        raise ValueError(f"{name} must be a number in range, got {value!r}; supported: {supported}")


def check_integer(name: str, value: Any, low: int, high: int, *, supported: str) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not low <= int(value) <= high:
        raise ValueError(
            f"{name} must be an integer from {low} to {high}, got {value!r}; supported: {supported}"
        )


def check_positive(**arguments: Any) -> None:
    """Raise a ValueError for the first argument that is no positive int."""
    for name, value in arguments.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")


def check_ints(**arguments: Any) -> None:
    """Raise a ValueError for the first argument that is no int."""
    for name, value in arguments.items():
        if type(value) is not int:
            raise ValueError(f"{name} must be an int, got {value!r}")


def check_bools(**arguments: Any) -> None:
    """Raise a ValueError for the first argument that is no bool."""
    for name, value in arguments.items():
        if type(value) is not bool:
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_known(name: str, value: Any, known: Sequence[str | bool | None]) -> None:
    """Raise a ValueError if `value` is not among those that are known."""
    if value not in known:
        supported = ", ".join(map(str, known))
        raise ValueError(f"{name} must be known, got {value!r}; supported: {supported}")
