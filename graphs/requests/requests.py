"""Requests: their limits, their checks, their progress, and the book that holds them by id."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_ops.integrations.transformers.rotary import SHIFT
from graphs.requests.defaults import Defaults
from graphs.requests.embeds import Embeds, check_embeds, embedded
from graphs.requests.text import TextOfTokens
from graphs.requests.tokens import Tokens, listed_ids, token_ids, unpadded
from graphs.sampling import FIELDS, SamplingParams
from graphs.sampling.edits import Editing, Edits, bits_of
from graphs.sampling.logprobs import MOST
from graphs.sampling.params import check_bools, check_integer, check_positive

FAR = 2**31
"""Beyond every position, and more steps than a request takes."""

MAX_STOP_TOKENS = 8
"""Of a request that the device watches. Further ones the host sees, when it reads the tokens."""

PACKED = np.dtype(
    [
        *((name, str(dtype).removeprefix("torch.")) for name, (dtype, _) in FIELDS.items()),
        ("stop_tokens", "int64", MAX_STOP_TOKENS),
        ("last_position", "int64"),  # of what it computes
        ("prompt", "int64"),
        ("end", "int64"),
        ("kind", "int64"),
        ("logprobs", "int64"),
        ("editing", "int64"),
        ("num_biases", "int64"),
        ("scored", "int64", 2),
    ]
)
"""What of a request never changes: fields of a step's tensors, lengths, the kind of sampling."""


LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""As Transformers' `LogitsProcessorList`: tokens [1, T] and logits [1, V] float32 to logits."""


class Scoring(NamedTuple):
    """What of a prompt is scored: the tokens that follow its rows from `begin` on."""

    begin: int
    given: Sequence[int]  # by row: the token that follows it
    num_top: int = 0  # most likely tokens beside it
    token_ids: Sequence[int] = ()  # others, of which every row gets the log-probabilities


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt and what has been generated for it."""

    id: int
    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingParams  # its seed is set
    eos: frozenset[int]
    stops: frozenset[int]  # all tokens that end it, those of `eos` too
    max_tokens: int  # tokens of it that the cache may hold
    embeds: Embeds | None = None  # of its prompt, whose tokens are 0 then
    shift: int = 0  # of its positions, SHIFT where its prompt is beyond longrope's original context
    token_ids: list[int] = dataclasses.field(default_factory=list)  # generated
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)  # rows of `packed`
    edits: Edits | None = None
    grammar: Any = None  # a `GrammarState`, where its output is structured
    error: Exception | None = None  # of its own: a processor, its text, no token that may follow
    processor: LogitsProcessor | None = None
    text: TextOfTokens | None = None  # where strings end it, or it is streamed
    streams: bool = False  # outputs of steps have its text
    scoring: Scoring | None = None  # None: nothing of its prompt is scored
    scores: list[np.ndarray] = dataclasses.field(default_factory=list)  # of each step, of `packed`
    num_computed: int = 0  # tokens whose keys and values are in the cache
    share_prefix: bool = True  # where the session shares prefixes
    block_keys: Sequence[bytes] = ()  # of the prompt; empty: not made yet
    num_kept: int = 0  # tokens that others may find in its blocks
    room: int = 0  # tokens that its blocks hold at least, of all layers
    whole_room: int = 0  # the same of layers that see all keys
    num_released: int = 0  # of its first blocks, that were given back behind the layers' window
    nothing_from: int = FAR  # tokens of a step that is launched, after which none may be drawn
    state_slots: tuple[int, ...] = (0,)  # of a `StatePool`, where layers keep states
    # By tokens of its prompt, states that a step is to keep: a block's key, and the slot.
    checkpoints: dict[int, tuple[bytes, int]] = dataclasses.field(default_factory=dict)
    num_seen: int = 0  # tokens that its states have seen when what is launched is over
    num_lost: int = 0  # tokens that were computed before it was preempted
    tokenizer: Any = None  # None: its text is not asked for
    versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # from that token on
    begun_at: int = -1  # times that the session had forgotten prefixes before; -1: it waits yet

    @property
    def finish_reason(self) -> str | None:
        """See `Generation`; None while it goes on."""
        if self.error is not None:
            return "error"
        if self.text is not None and self.text.stop_reason is not None:
            return "stop"
        if self.token_ids and self.token_ids[-1] in self.stops:
            return "eos" if self.token_ids[-1] in self.eos else "stop"
        if self.remaining > 0:
            return None
        return "length" if len(self.token_ids) >= self.max_new_tokens else "max_tokens"

    @property
    def text_ids(self) -> list[int]:
        """Its tokens but for the one that ended it."""
        ended = self.token_ids[-1:] and self.token_ids[-1] in self.stops
        return self.token_ids[:-1] if ended else self.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.end - len(self.prompt) - len(self.token_ids)

    # Cached: it never changes, and a step asks hundreds of requests.
    @functools.cached_property
    def end(self) -> int:
        """Tokens of prompt and output at most."""
        return min(len(self.prompt) + self.max_new_tokens, self.max_tokens + 1)

    @property
    def longest(self) -> int:
        """Tokens the cache holds at most: the last generated one is never written."""
        return self.end - 1

    # Cached: a step copies the tokens of its prompts.
    @functools.cached_property
    def prompt_array(self) -> np.ndarray:
        """The prompt, int64."""
        return np.array(self.prompt, dtype=np.int64)

    # Cached: a step joins those of hundreds of requests.
    @functools.cached_property
    def packed(self) -> bytes:
        """One of `PACKED`."""
        stops = sorted(self.stops)[:MAX_STOP_TOKENS]
        stops += [-1] * (MAX_STOP_TOKENS - len(stops))
        fields = tuple(getattr(self.sampling, name) for name in FIELDS)
        rest = (
            stops,
            self.shift + self.longest - 1,
            len(self.prompt),
            self.end,
            self.sampling.kind,
            -1 if self.sampling.logprobs is None else self.sampling.logprobs,
            self.editing,
            0 if self.edits is None else len(self.edits.bias),
            (FAR, 0) if self.scoring is None else (self.scoring.begin, len(self.scoring.given)),
        )
        return np.array((*fields, *rest), dtype=PACKED).tobytes()

    def tokens(self, begin: int, end: int) -> list[int]:
        """Tokens at positions begin to end, of the prompt and then of the generated ones."""
        split = len(self.prompt)
        return self.prompt[begin:end] + self.token_ids[max(0, begin - split) : max(0, end - split)]

    @property
    def min_tokens(self) -> int:
        """Tokens before which it does not end."""
        return 0 if self.edits is None else self.edits.min_tokens

    @property
    def editing(self) -> Editing:
        """How its logits are edited."""
        if self.processor is not None:
            return Editing.CALLED
        if self.grammar is not None:
            return Editing.BY_TOKENS
        return Editing.NONE if self.edits is None else self.edits.kind

    def fill_allowed(self, rows: np.ndarray, draft: Sequence[int]) -> None:
        """Write into rows [1 + k, W] of bits what may follow its tokens, and those of a draft.

        `nothing_from` is the first row where nothing may: the request ends there with an error.
        """
        rows[:], edits = -1, self.edits
        if edits is not None:
            last = self.tokens(max(0, self.num_tokens - edits.longest), self.num_tokens)
            for number, row in enumerate(rows):
                edits.fill(row, [*last, *draft[:number]])
        if self.grammar is not None:
            by_grammar = np.empty_like(rows)
            self.grammar.fill_drafted(by_grammar, draft)
            rows &= by_grammar
        self.nothing_from = FAR
        if self.editing >= Editing.BY_TOKENS:
            blocked = (n for n, row in enumerate(rows) if not self._may_go_on(row, n))
            self.nothing_from = next(blocked, FAR)

    def _may_go_on(self, row: np.ndarray, number: int) -> bool:
        """Whether any bit of the row [W] is set, of tokens that may be drawn after so many more."""
        if len(self.token_ids) + number >= self.min_tokens:
            return bool(row.any())
        return bool((row & ~bits_of(self.stops, row.size)).any())

    def first_unscored(self) -> int:
        """The first row of its prompt whose logits are wanted yet; FAR: none."""
        if self.scoring is None:
            return FAR
        row = self.scoring.begin + sum(map(len, self.scores))
        return row if row < len(self.scoring.given) else FAR

    def append(self, token: int, logprobs: np.ndarray | None = None) -> None:
        """Take a generated token; its own keys and values are not in the cache, all others are."""
        if self.grammar is not None:
            self.grammar.accept(token)
        self.token_ids.append(token)
        if self.sampling.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs[: 1 + self.sampling.logprobs].copy())
        self.num_computed = self.num_tokens - 1
        if self.text is not None and token not in self.stops:
            self.text.push(token, stops=len(self.token_ids) > self.min_tokens)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a session takes."""

    vocab_size: int  # token ids are from 0 to `vocab_size - 1`
    max_tokens: int  # the longest prompt, and the most tokens of a request in the cache
    cache_tokens: int  # that the empty cache holds
    seed: int  # of requests that bring none
    media: Mapping[int, str]  # tokens that stand for images or sound, with their names
    rope_boundary: int | None = None  # longer requests have other RoPE


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a caller asks of all requests of a call, unchecked. See `DecodeSession.generate`."""

    max_new_tokens: int | None = None  # None: as the model's generation config says, else 16
    eos: int | Iterable[int] | None = None  # None: that of the model's generation config
    eos_token_id: int | Iterable[int] | None = None  # the same by another name
    ignore_eos: bool = False
    stop_token_ids: int | Iterable[int] | None = None
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    logits_processor: LogitsProcessor | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    share_prefix: bool = True
    n: int = 1  # requests of each prompt
    generation_config: Any = None  # in place of the model's
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `SamplingParams`

    @classmethod
    def of(cls, max_new_tokens: int | None, named: Mapping[str, Any]) -> "Wanted":
        """From what a caller names; what is not a field is one of `SamplingParams`."""
        own = {field.name for field in dataclasses.fields(cls)} - {"sampling"}
        sampling = {name: value for name, value in named.items() if name not in own}
        fields = {name: value for name, value in named.items() if name in own}
        return cls(max_new_tokens, **fields, sampling=sampling)

    def ends(self, defaults: Defaults, vocab_size: int) -> tuple[frozenset[int], frozenset[int]]:
        """eos tokens, and all tokens that end a request."""
        check_bools(ignore_eos=self.ignore_eos)
        given = [
            frozenset(token_ids(name, listed_ids(name, value), vocab_size, ordered=False))
            for name, value in (("eos", self.eos), ("eos_token_id", self.eos_token_id))
            if value is not None
        ]
        if len(set(given)) > 1:
            raise ValueError(
                "eos and eos_token_id must be the same where both are given, "
                f"got {sorted(given[0])} and {sorted(given[1])}"
            )
        # No step draws tokens outside the vocabulary, which a config may name.
        eos = (
            given[0]
            if given
            else frozenset(t for t in defaults.tokens("eos_token_id") if 0 <= t < vocab_size)
        )
        eos = frozenset() if self.ignore_eos else eos
        name, stops = "stop_token_ids", self.stop_token_ids
        return eos, eos.union(token_ids(name, listed_ids(name, stops), vocab_size, ordered=False))


def checked_requests(
    first_id: int,
    prompts: Iterable[Any],
    wanted: Wanted,
    defaults: Defaults,
    limits: Limits,
    tokens_of: Tokens,
) -> list[Request]:
    """Requests with ids from `first_id` on, or a ValueError that names argument and value.

    Those of one prompt differ in their seeds.

    Args:
        first_id: id of the first request.
        prompts: text or token ids of each, or a tokenizer's mapping.
        wanted: what the caller asks for.
        defaults: what holds where the caller asks for nothing.
        limits: of the session.
        tokens_of: the session's tokenizer.
    """
    wanted = dataclasses.replace(wanted, **defaults.edits(vars(wanted)))
    params, ends = defaults.params(wanted.sampling), wanted.ends(defaults, limits.vocab_size)
    check_positive(n=wanted.n)
    check_bools(share_prefix=wanted.share_prefix, stream=wanted.stream)
    if wanted.logits_processor is not None and not callable(wanted.logits_processor):
        raise ValueError(
            f"logits_processor must be callable, got {wanted.logits_processor!r:.80}; supported: "
            "a LogitsProcessorList, or a function of tokens [1, T] and logits [1, V]"
        )
    edits = _edits(wanted, ends[1], limits, tokens_of)
    new_text, new_grammar = tokens_of.texts(wanted), tokens_of.grammars(wanted, ends[1])
    requests: list[Request] = []
    pads, eos = defaults.tokens("pad_token_id"), ends[0]
    eos = eos | defaults.tokens("eos_token_id") if pads else eos
    for prompt in unpadded(tokens_of.prompts(prompts), pads, eos):
        embeds = None
        if isinstance(prompt, Embeds):
            check_embeds(vars(wanted), params.repetition_penalty)
            prompt, embeds = [0] * len(prompt), prompt
        tokens = checked_prompt(prompt, limits)
        new = wanted.max_new_tokens
        new = defaults.max_new_tokens(len(tokens)) if new is None else new
        check_length(tokens, new, limits)
        scoring = _scoring(wanted, tokens, limits)
        for sample in range(wanted.n):
            number = first_id + len(requests)
            seed = _seed_of(params, sample, _seed(limits.seed, number))
            own = dataclasses.replace(params, seed=seed)
            request = Request(number, tokens, new, own, *ends, limits.max_tokens)
            request.share_prefix, request.scoring = wanted.share_prefix, scoring
            request.embeds = embeds
            request.edits, request.tokenizer = edits, tokens_of.tokenizer
            request.text, request.grammar = new_text(), new_grammar()
            request.streams, request.processor = wanted.stream, wanted.logits_processor
            if limits.rope_boundary is not None and len(tokens) > limits.rope_boundary:
                request.shift = SHIFT
            requests.append(request)
    return requests


def _edits(
    wanted: Wanted, stops: frozenset[int], limits: Limits, tokens_of: Tokens
) -> Edits | None:
    names = ("logit_bias", "bad_words", "allowed_token_ids", "min_tokens")
    if all(getattr(wanted, name) is None for name in names):
        return None
    edits = Edits.of(
        limits.vocab_size,
        logit_bias=wanted.logit_bias,
        bad_words=tokens_of.words(wanted.bad_words),
        allowed_token_ids=wanted.allowed_token_ids,
        min_tokens=0 if wanted.min_tokens is None else wanted.min_tokens,
    )
    kept = edits.allowed
    if edits.min_tokens and kept is not None and not (kept & ~bits_of(stops, kept.size)).any():
        raise ValueError(
            "allowed_token_ids must hold a token that does not end a request with "
            f"min_tokens={edits.min_tokens}, got {wanted.allowed_token_ids!r:.80}"
        )
    if edits.min_tokens and len(stops) > MAX_STOP_TOKENS:
        raise ValueError(
            f"min_tokens must be 0 with more than {MAX_STOP_TOKENS} tokens that end a request, "
            f"got {edits.min_tokens} with {len(stops)}"
        )
    return edits


def _scoring(wanted: Wanted, prompt: list[int], limits: Limits) -> Scoring | None:
    if wanted.prompt_logprobs is None:
        return None
    most = min(MOST, limits.vocab_size)
    check_integer("prompt_logprobs", wanted.prompt_logprobs, 0, most, supported="None for none")
    return Scoring(0, prompt[1:], wanted.prompt_logprobs)


def _seed_of(params: SamplingParams, sample: int, default: int) -> int:
    """That of a sample of a prompt: the first has the given one, others those after it."""
    if params.seed is None:
        return default
    return (params.seed + sample + 2**63) % 2**64 - 2**63


def checked_prompt(prompt: Sequence[int], limits: Limits) -> list[int]:
    vocab_size, max_tokens = limits.vocab_size, limits.max_tokens
    tokens = token_ids("prompt", prompt, vocab_size)
    if not tokens:
        raise ValueError("prompt must hold at least one token, got an empty one")
    if len(tokens) > max_tokens:
        raise ValueError(
            f"prompt must be at most max_tokens={max_tokens} long, got {len(tokens)} tokens"
        )
    if media := limits.media.keys() & set(tokens):
        token = min(media)
        raise ValueError(
            f"prompt must be text, got {token}, which is {limits.media[token]} of the model's "
            "config; supported: prompts without images, videos and sound"
        )
    return tokens


def check_length(tokens: list[int], max_new_tokens: int, limits: Limits) -> None:
    check_positive(max_new_tokens=max_new_tokens)
    longest = min(len(tokens) + max_new_tokens - 1, limits.max_tokens)
    if limits.rope_boundary is not None and len(tokens) <= limits.rope_boundary < longest:
        raise ValueError(
            f"max_new_tokens must be at most {limits.rope_boundary + 1 - len(tokens)} for a prompt "
            f"of {len(tokens)} tokens, got {max_new_tokens}: beyond {limits.rope_boundary} tokens "
            "longrope has other factors for all keys; supported: longer prompts, which have them "
            "from the start"
        )
    if longest > limits.cache_tokens:
        raise ValueError(
            f"prompt and max_new_tokens must fit into the cache of {limits.cache_tokens} tokens, "
            f"got {len(tokens)} and {max_new_tokens}"
        )


def known_request(name: str, request_id: Any, requests: Mapping[int, Request]) -> Request:
    """The request of an id, which argument `name` gave, or a ValueError."""
    if not isinstance(request_id, Integral) or request_id not in requests:
        place = "come from add()" if name == "request_id" else "be for requests of this session"
        raise ValueError(f"{name} must {place}, got {request_id!r}")
    return requests[int(request_id)]


def _seed(session_seed: int, request_id: int) -> int:
    """Seeds of requests that bring none: far apart for sessions and requests (SplitMix64)."""
    x = (session_seed * 0x9E3779B97F4A7C15 + request_id * 0xBF58476D1CE4E5B9 + 1) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) % 2**63


class RequestBook:
    """Knows every request until it is discarded.

    Args:
        model: whose generation config gives requests their defaults.
        limits: what the session takes.
        waiting: where requests queue.
        tokens_of: the session's tokenizer.
    """

    def __init__(
        self, model: Any, limits: Limits, waiting: deque[Request], tokens_of: Tokens
    ) -> None:
        self._model, self.limits, self._waiting = model, limits, waiting
        self.tokens_of = tokens_of
        self.requests: dict[int, Request] = {}
        self.next_id = 0
        self.weight_version = 0  # times that `update_weights` was called

    def queue_all(self, prompts: Iterable[Any], wanted: Wanted) -> list[Request]:
        """Queue all prompts, or none where one is refused; returns what they have become."""
        listed = isinstance(prompts, list | tuple)
        if isinstance(prompts, Mapping) or (
            listed and any(isinstance(p, Mapping) for p in prompts)
        ):
            prompts = embedded(prompts, self._model)
        places = self.next_id, prompts, wanted, self._defaults(wanted)
        return self.queue(checked_requests(*places, self.limits, self.tokens_of))

    def compile_grammar(self, wanted: Wanted) -> None:
        """Compile what requests will find, from any thread; raises as `queue_all` will."""
        ends = wanted.ends(self._defaults(wanted), self.limits.vocab_size)
        self.tokens_of.grammars(wanted, ends[1])

    def _defaults(self, wanted: Wanted) -> Defaults:
        own = getattr(self._model, "generation_config", None)
        return Defaults.of(own, wanted.generation_config)

    def queue(self, requests: list[Request]) -> list[Request]:
        """Queue requests with ids from `next_id` on."""
        self.next_id += len(requests)
        for request in requests:
            request.versions = [(0, self.weight_version)]
        self.requests |= {request.id: request for request in requests}
        self._waiting += requests
        return requests
