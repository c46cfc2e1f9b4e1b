"""Which steps become CUDA graphs, and under which key a graph is stored."""

import dataclasses
from collections.abc import Iterator, Sequence
from enum import Enum

from graphs.sampling.params import Sampling


class CUDAGraphMode(Enum):
    """What of a session is captured.

    Decode batches are uniform, every request brings the same number of tokens; all others are
    mixed. NONE, PIECEWISE and FULL are also what a single step runs under, its runtime mode.
    """

    NONE = "none"
    """Nothing."""
    PIECEWISE = "piecewise"
    """Every step but its attention, which runs between graphs."""
    FULL = "full"
    """Every step whole, model to sampling."""
    FULL_DECODE_ONLY = "full_decode_only"
    """Decode steps whole, mixed ones not at all."""
    FULL_AND_PIECEWISE = "full_and_piecewise"
    """Decode steps whole, mixed ones but for their attention."""

    @classmethod
    def parse(cls, mode: "CUDAGraphMode | str") -> "CUDAGraphMode":
        """A mode from its name in either case.

        Raises:
            ValueError: there is none of that name.
        """
        if isinstance(mode, cls):
            return mode
        for known in cls:
            if isinstance(mode, str) and mode.lower() == known.value:
                return known
        names = ", ".join((*(known.name for known in cls), "auto"))
        raise ValueError(f"cudagraph_mode must be known, got {mode!r}; supported: {names}")

    @classmethod
    def of(cls, decode: "CUDAGraphMode", mixed: "CUDAGraphMode") -> "CUDAGraphMode":
        """The mode with these runtime modes, or else the one that decode steps run under."""
        for mode in cls:
            if (mode.decode_mode(), mode.mixed_mode()) == (decode, mixed):
                return mode
        return decode

    def decode_mode(self) -> "CUDAGraphMode":
        """Runtime mode of decode batches."""
        return CUDAGraphMode.FULL if self.separate_routine() else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """Runtime mode of all other batches."""
        if self is CUDAGraphMode.FULL_DECODE_ONLY:
            return CUDAGraphMode.NONE
        return CUDAGraphMode.PIECEWISE if self is CUDAGraphMode.FULL_AND_PIECEWISE else self

    def has_mode(self, mode: "CUDAGraphMode") -> bool:
        """Whether decode or mixed batches run under this runtime mode."""
        return mode in (self.decode_mode(), self.mixed_mode())

    def separate_routine(self) -> bool:
        """Whether decode batches run under another mode than mixed ones."""
        return self in (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)


RUNTIME_MODES = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE)
"""What one step may run under, the best first."""


@dataclasses.dataclass(frozen=True, order=True)
class BatchDescriptor:
    """Key of a captured graph: every host value that reaches a kernel launch stands in it."""

    num_tokens: int  # of the step, padding included
    num_reqs: int  # requests, padding included
    uniform: bool = False  # every request brings num_tokens / num_reqs tokens
    sampling: Sampling = Sampling.GREEDY
    logits: bool = True  # False: chunks of prompts, none of which ends; no token is drawn
    logprobs: int = -1  # most likely tokens that log-probabilities are computed of; -1: none at all
    edits: int = -1  # most biases of a request, where logits are edited; -1: they are not
    groups: int = 0  # most groups of requests whose shared prefixes are attended to apart
    # What tokens are allowed is uploaded while the model's graph runs: a second graph draws.
    late_edits: bool = False

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_reqs"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be an int, got {getattr(self, name)!r}")
        if not 1 <= self.num_reqs <= self.num_tokens:
            raise ValueError(
                f"num_reqs must be from 1 to num_tokens={self.num_tokens}, got {self.num_reqs}"
            )
        if type(self.logits) is not bool:
            raise ValueError(f"logits must be True or False, got {self.logits!r}")
        if self.uniform and not self.logits:
            raise ValueError("logits must be True in a uniform batch, got False")
        if self.uniform and self.num_tokens % self.num_reqs:
            raise ValueError(
                f"num_tokens of a uniform batch must be a multiple of num_reqs={self.num_reqs}, "
                f"got {self.num_tokens}"
            )
        if type(self.groups) is not int or self.groups < 0:
            raise ValueError(f"groups must be an int of at least 0, got {self.groups!r}")
        if self.groups and self.query_len != 1:
            raise ValueError(f"groups must be 0 but for single tokens, got {self.groups}")

    @property
    def query_len(self) -> int | None:
        """Tokens of every request; None if they may differ."""
        return self.num_tokens // self.num_reqs if self.uniform else None

    def in_words(self) -> str:
        """decode 8; decode 8, up to 2 prefixes apart; uniform 8 x 4; mixed 64 tokens, 9 requests;
        chunks of 64 tokens, 9 requests, no logits.
        """
        if self.query_len == 1:
            apart = f", up to {self.groups} prefixes apart" if self.groups else ""
            return f"decode {self.num_reqs}{apart}"
        if self.uniform:
            return f"uniform {self.num_reqs} x {self.query_len}"
        if not self.logits:
            return f"chunks of {self.num_tokens} tokens, {self.num_reqs} requests, no logits"
        return f"mixed {self.num_tokens} tokens, {self.num_reqs} requests"


MOST_REQUESTS = 2**16
"""That run at a time."""


def default_capture_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, multiples of 8 to 256, then of 16, and `max_batch_size` itself.

    Raises:
        ValueError: `max_batch_size` is no positive int.
    """
    if type(max_batch_size) is not int or max_batch_size < 1:
        raise ValueError(f"max_batch_size must be a positive int, got {max_batch_size!r}")
    if max_batch_size > MOST_REQUESTS:
        raise ValueError(f"max_batch_size must be at most {MOST_REQUESTS}, got {max_batch_size}")
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_batch_size + 1, 16)]
    return sorted({size for size in sizes if size < max_batch_size} | {max_batch_size})


def default_mixed_sizes(max_tokens: int) -> list[int]:
    """16, 32, multiples of 64 to 512, of 128 to 1024, then powers of 2 to 2048, and `max_tokens`.

    Small steps gain most by a graph, and padding costs them most.
    """
    sizes = [16, 32, *range(64, 513, 64), *range(640, 1025, 128), 2048]
    return [*(size for size in sizes if size < max_tokens), max_tokens]


def checked_capture_sizes(sizes: Sequence[int] | None, max_batch_size: int) -> list[int]:
    """The wanted sizes in order, or the default ones.

    Raises:
        ValueError: a size is out of range.
    """
    if sizes is None:
        return default_capture_sizes(max_batch_size)
    return checked_sizes("capture_sizes", sizes, "max_batch_size", max_batch_size)


def checked_sizes(
    name: str, sizes: Sequence[int], bound: str = "", largest: int | None = None
) -> list[int]:
    """Distinct sizes of at least 1, in order; at most `largest`, which is called `bound`.

    Raises:
        ValueError: they are no sequence, or one is no int or out of range.
    """
    try:
        if isinstance(sizes, str | bytes | Iterator):
            raise TypeError
        listed = list(sizes)
    except TypeError:  # of a tensor without dimensions too
        raise ValueError(f"{name} must be a sequence of ints, got {sizes!r:.80}") from None
    for size in listed:
        is_int = type(size) is int
        if not is_int or size < 1 or (largest is not None and size > largest):
            span = "at least 1" if largest is None else f"from 1 to {bound}={largest}"
            raise ValueError(f"{name} must be {'' if is_int else 'ints '}{span}, got {size!r}")
    return sorted(set(listed))
