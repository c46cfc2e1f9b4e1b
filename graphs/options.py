"""The arguments of a session: checked together, before anything is made."""

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from attn_ops import Backend
from attn_ops.metadata import KVCacheLayoutType, kv_dtype_of
from attn_ops.states import StateSpec
from graphs.capture.verifier import Verifier
from graphs.modes import (
    CUDAGraphMode,
    checked_capture_sizes,
    checked_sizes,
    default_mixed_sizes,
)
from graphs.sampling.params import check_bools, check_ints, check_known, check_positive

DEBUGS = (None, "eager_replay")
ON_FAILURE = ("raise", "continue")
RESERVES = ("need", "length")
MERGES = ("auto", True, False)
LOGPROBS = ("raw_logprobs", "processed_logprobs")
MOST_DRAFT_TOKENS = 32
MOST_DECODE_STEPS = 1024
LARGEST_BY_DEFAULT = 2048
"""Tokens of a step with prompts: the default budget of a step, which long prompts fill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How a `DecodeSession` runs.

    Attributes:
        max_batch_size: requests that run at a time, at most 65,536; more wait.
        max_tokens: tokens of one request that the cache may hold; a longer prompt is refused.
        cudagraph_mode: see `CUDAGraphMode`; "auto": FULL, with prompts of up to 2,048 tokens, or
            FULL_DECODE_ONLY where the backend's prompts cannot be captured, and on several ranks;
            without a warning where the model is on a CPU. If it cannot be had, `graph_mode_why`
            says why.
        backend: an attention backend, or its name; None lets `select_backend` choose.
        block_size: tokens a block of the cache holds.
        cache_tokens: tokens the cache holds; None: every request of the batch at its longest (with
            `share_prefixes` 8 times that), on a GPU no more than is left of it.
        memory_fraction: of a GPU's memory that weights, steps, graphs, the cache and what others
            use may take together, where `cache_tokens` is None.
        reserve: "need": a request has blocks for its known tokens and grows. If no block is left,
            the youngest is preempted, and computed again later. "length": a request waits until
            there are blocks for its longest sequence, and is never preempted. Same tokens.
        max_tokens_per_step: token budget of a step; longer prompts are computed in chunks.
        capture_sizes: captured batch sizes; default `default_capture_sizes(max_batch_size)`.
        mixed_capture_sizes: tokens of captured steps with prompts in them, where the mode has any;
            default `default_mixed_sizes(max_tokens_per_step)`, at most 2,048 with "auto", each used
            where it is faster than calling the step, as timed when it is captured.
        seed: of the random numbers of requests that bring no seed of their own.
        kv_cache_dtype: auto, the model's; or fp8_e4m3 (or fp8), fp8_e5m2, scaled by the [1] float32
            tensors `k_scale` and `v_scale` that attention modules may have.
        cache_layout: of `PagedKVCache`.
        decode_steps: decode steps that the device runs without the host, at most 1024; the tokens
            are those of 1.
        num_draft_tokens: k of `verify_draft`; batches of 1 + k tokens a request are captured too.
        verify: compare replays with calls: "first" of a graph, an int for every so many, "always";
            a `Verifier`; None: never. A difference raises `VerificationError`.
        debug: None, or "eager_replay": every step takes the capture path, but is called again where
            a graph would be replayed. Modes are lowered as on CUDA; on a CPU only where groups of
            layers have different backends, or the backend needs lengths on the host.
        strict: a mode that cannot be had is a ValueError, and so is on_capture_failure "continue".
        lazy_capture: capture a size when it is first needed, not all before the first step.
        share_prefixes: a prompt does not compute again what the cache holds of its first tokens;
            requests may opt out. Off, until it is measured on a GPU.
        merge_projections: q, k, v become one product, gate, up another, and so do projections of
            layers with a state; parameters stay, as views of the merged weights
            (`attn_ops.integrations.merged`). "auto": of a compiled model on a GPU whose weights are
            not quantized.
        on_capture_failure: "raise", or "continue": such steps run uncaptured, and are reported.
        compile_cache: a folder for compiled models, which the next process loads instead of
            compiling; None: none. Only its owner may be able to write it: what is in it is run.
        can_sleep: `sleep` can give the cache's memory back; on a GPU it needs cuda-bindings.
        logits_function: what every token is drawn from, in captured steps too: a function of logits
            [R, V] and a mapping with `positions` [R] int64, of the drawn token in its sequence, and
            `tokens` [R] int64, the last one of each row; it returns logits [R, V].
        logprobs_mode: what log-probabilities are of: "raw_logprobs", the model's logits, or
            "processed_logprobs", the logits after penalties, filters and temperature.
        batch_invariant: a row's logits depend on its own tokens alone, bit by bit: not on the
            batch, chunks of prompts, graphs or the cache (docs/batch_invariance.md). Of compiled
            models on Hopper GPUs; what cannot be had so is refused.

    Raises:
        ValueError: an argument is out of range, or two contradict each other.
    """

    max_batch_size: int
    max_tokens: int
    cudagraph_mode: CUDAGraphMode | str = "auto"
    backend: str | Backend | None = None
    block_size: int = 16
    cache_tokens: int | None = None
    memory_fraction: float = 0.9
    reserve: str = "need"
    max_tokens_per_step: int = 2048
    capture_sizes: Sequence[int] | None = None
    mixed_capture_sizes: Sequence[int] | None = None
    seed: int = 0
    kv_cache_dtype: str = "auto"
    cache_layout: KVCacheLayoutType | None = None
    decode_steps: int = 1
    num_draft_tokens: int = 0
    verify: Verifier | str | int | None = None
    debug: str | None = None
    strict: bool = False
    lazy_capture: bool = False
    on_capture_failure: str = "raise"
    share_prefixes: bool = False
    merge_projections: bool | str = False
    compile_cache: str | os.PathLike[str] | None = None
    can_sleep: bool = False
    logits_function: Callable[..., Any] | None = None
    logprobs_mode: str = "raw_logprobs"
    batch_invariant: bool = False

    @classmethod
    def of(cls, options: "SessionOptions | None", changes: dict[str, Any]) -> "SessionOptions":
        """`options` with some fields changed; without, the defaults.

        Raises:
            TypeError: a field is unknown, or one without a default is missing.
            ValueError: a field is out of range, or two contradict each other.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                meant = f", which may mean {near[0]!r}" if near else ""
                raise TypeError(
                    f"option must be known, got {name!r}{meant}; supported: {', '.join(known)}"
                )
        if options is None:
            return cls(**changes)
        if not isinstance(options, cls):
            raise TypeError(
                f"options must be SessionOptions or None, got {type(options).__name__}; "
                "other arguments are given by name"
            )
        return dataclasses.replace(options, **changes)

    def __post_init__(self) -> None:
        names = ["max_batch_size", "max_tokens", "max_tokens_per_step", "block_size"]
        names += ["decode_steps"] + ["cache_tokens"] * (self.cache_tokens is not None)
        check_positive(**{name: getattr(self, name) for name in names})
        if self.decode_steps > MOST_DECODE_STEPS:
            raise ValueError(
                f"decode_steps must be at most {MOST_DECODE_STEPS}, got {self.decode_steps}"
            )
        check_ints(seed=self.seed)
        check_bools(strict=self.strict, lazy_capture=self.lazy_capture)
        check_bools(share_prefixes=self.share_prefixes, can_sleep=self.can_sleep)
        check_bools(batch_invariant=self.batch_invariant)
        check_known("debug", self.debug, DEBUGS)
        fraction = self.memory_fraction
        if type(fraction) not in (int, float) or not 0 < fraction <= 1:
            raise ValueError(f"memory_fraction must be over 0 and at most 1, got {fraction!r}")
        check_known("reserve", self.reserve, RESERVES)
        check_known("on_capture_failure", self.on_capture_failure, ON_FAILURE)
        check_known("merge_projections", self.merge_projections, MERGES)
        check_known("logprobs_mode", self.logprobs_mode, LOGPROBS)
        if not (self.logits_function is None or callable(self.logits_function)):
            raise ValueError(
                f"logits_function must be callable or None, got {self.logits_function!r:.80}"
            )
        folder = self.compile_cache
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise ValueError(f"compile_cache must be a path or None, got {folder!r}")
        k = self.num_draft_tokens
        if type(k) is not int or not 0 <= k <= MOST_DRAFT_TOKENS:
            raise ValueError(
                f"num_draft_tokens must be an int from 0 to {MOST_DRAFT_TOKENS}, got {k!r}"
            )
        _ = self.mode, self.decode_sizes, self.mixed_sizes  # each raises what is wrong with it
        self._check_together()

    def _check_together(self) -> None:
        if self.num_cache_tokens < self.block_size:
            raise ValueError(
                f"cache_tokens must hold a block of block_size={self.block_size} tokens, "
                f"got {self.cache_tokens}"
            )
        if self.strict and self.on_capture_failure == "continue":
            raise ValueError(
                "on_capture_failure must be 'raise' with strict=True, got 'continue'; "
                "supported: raise"
            )
        if self.debug is not None and self.mode is CUDAGraphMode.NONE:
            names = ", ".join(m.name for m in CUDAGraphMode if m is not CUDAGraphMode.NONE)
            raise ValueError(
                f"cudagraph_mode must capture something with debug={self.debug!r}, got NONE; "
                f"supported: {names}"
            )

    def check_states(self, specs: Sequence[StateSpec]) -> None:
        """Raise a ValueError if a model whose layers keep such states cannot have them."""
        if specs and self.batch_invariant:
            raise ValueError(
                "batch_invariant must be False for a model whose layers keep states, got True"
            )

    @property
    def mode(self) -> CUDAGraphMode:
        """Of "auto" the most that it may be."""
        return CUDAGraphMode.FULL if self.any_mode else CUDAGraphMode.parse(self.cudagraph_mode)

    @property
    def any_mode(self) -> bool:
        """Whether the caller leaves the mode to the session."""
        mode = self.cudagraph_mode
        return isinstance(mode, str) and mode.lower() == "auto"

    @property
    def decode_sizes(self) -> list[int]:
        return checked_capture_sizes(self.capture_sizes, self.max_batch_size)

    @property
    def mixed_sizes(self) -> list[int]:
        """Tokens of captured steps with prompts: the wanted ones, or `default_mixed_sizes`."""
        most = self.max_tokens_per_step
        if self.mixed_capture_sizes is None:
            return default_mixed_sizes(min(most, LARGEST_BY_DEFAULT) if self.any_mode else most)
        sizes = self.mixed_capture_sizes
        return checked_sizes("mixed_capture_sizes", sizes, "max_tokens_per_step", most)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Tokens of every request in uniform batches."""
        return (1, 1 + self.num_draft_tokens) if self.num_draft_tokens else (1,)

    @property
    def lookahead(self) -> int | None:
        """Tokens behind the last known one that blocks are reserved for; None: all of a request."""
        if self.reserve == "length":
            return None
        return max(self.decode_steps, 1 + self.num_draft_tokens)

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the cache is to hold, if there is room for them."""
        if self.cache_tokens is not None:
            return self.cache_tokens
        return self.max_batch_size * math.ceil(self.max_tokens / self.block_size) * self.block_size

    def verifier(self) -> Verifier | None:
        """What compares replays with calls; None: nothing does.

        Raises:
            ValueError: it is none, or made for caches of another type.
        """
        verify = self.verify
        if not isinstance(verify, Verifier):
            verify = Verifier(verify, kv_cache_dtype=self.kv_cache_dtype)
        elif kv_dtype_of(verify.kv_cache_dtype) != kv_dtype_of(self.kv_cache_dtype):
            raise ValueError(
                f"verify must be made for kv_cache_dtype={self.kv_cache_dtype!r}, "
                f"got a Verifier for {verify.kv_cache_dtype!r}"
            )
        return None if verify.mode is None else verify
