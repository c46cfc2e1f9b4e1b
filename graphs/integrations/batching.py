"""What Transformers' continuous batching asks for, as options of a session and of requests."""

import copy
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from graphs.requests.defaults import Defaults
from graphs.requests.results import Generation

MOST_TOKENS = 4096
"""Of a request, where nobody says."""

HONOURED = frozenset((
    "page_size", "block_size", "num_blocks", "max_batch_tokens", "max_memory_percent",
    "max_requests_per_batch", "use_cuda_graph", "return_logprobs", "seed", "max_queue_size",
))  # fmt: skip
"""Fields of a `ContinuousBatchingConfig` that mean something to a session."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A generation config and a batching config, read once a call."""

    options: dict[str, Any]  # of the session
    wanted: dict[str, Any]  # of each request
    num_samples: int  # results of a prompt
    seed: int | None  # of the first result; others have those after it
    max_queue_size: int | None  # requests that wait at most; None: any number

    @classmethod
    def of(
        cls,
        model: Any,
        generation: GenerationConfig | None,
        batching: ContinuousBatchingConfig | None,
    ) -> "Asked":
        """From what the caller gave, else from the model's generation config.

        Fields of `batching` that mean nothing to a session are named in a warning.
        """
        given = model.generation_config if generation is None else generation
        config: Any = GenerationConfig() if given is None else copy.copy(given)
        number = config.num_return_sequences or 1
        config.num_return_sequences = None
        for source in (model.generation_config, model.config):  # what ends a text, as in `generate`
            if config.eos_token_id is None:
                config.eos_token_id = getattr(source, "eos_token_id", None)
        if batching is None:
            batching = getattr(config, "continuous_batching_config", None)
        batching = ContinuousBatchingConfig() if batching is None else batching
        wanted: dict[str, Any] = {"generation_config": config}
        if config.do_sample and config.top_k is None:
            wanted["top_k"] = 0  # here Transformers does not add its usual 50
        if batching.return_logprobs:
            wanted["logprobs"] = 0
        _warn_of_others(batching)
        if config.max_new_tokens is None and config.max_length is None:
            text = model.config.get_text_config()
            positions = getattr(text, "max_position_embeddings", None) or MOST_TOKENS
            config.max_length = min(positions, MOST_TOKENS)  # until eos, as there
        queue_size = batching.max_queue_size or None
        return cls(_options(batching), wanted, number, batching.seed, queue_size)

    def max_new_tokens(self, wanted: dict[str, Any], num_prompt: int) -> int:
        """New tokens of a prompt at most."""
        given = wanted.get("max_new_tokens")
        config = wanted["generation_config"]
        return Defaults.of(config).max_new_tokens(num_prompt) if given is None else given

    def longest(self, prompts: Sequence[Sequence[int]], wanted: dict[str, Any]) -> int:
        """Tokens of the longest prompt and its output together."""
        most = max(map(len, prompts))
        return most + self.max_new_tokens(wanted, most)

    def seeded(self, wanted: dict[str, Any], number: int) -> dict[str, Any]:
        """`wanted`, with the seed of result `number` of a call where there is one.

        With a seed of a prompt's own, its samples have that and those after it.
        """
        if wanted.get("seed") is not None and (sample := number % self.num_samples):
            return wanted | {"seed": wanted["seed"] + sample}
        return wanted if self.seed is None else {"seed": self.seed + number, **wanted}

    def names(self, request_id: str) -> list[str]:
        """The ids of a prompt's results: its samples', then its own."""
        return [f"{request_id}__child#{i}" for i in range(self.num_samples - 1)] + [request_id]


def _options(batching: ContinuousBatchingConfig) -> dict[str, Any]:
    page = getattr(batching, "page_size", None) or getattr(batching, "block_size", None)
    blocks, graphs = batching.num_blocks, batching.use_cuda_graph
    decodes = graphs[1] if isinstance(graphs, tuple) else graphs
    found = {
        "logprobs_mode": "processed_logprobs",
        "cache_tokens": None if blocks is None or page is None else blocks * page,
        "max_tokens_per_step": batching.max_batch_tokens,
        "max_batch_size": batching.max_requests_per_batch,
        "free_memory": batching.max_memory_percent,
        "cudagraph_mode": "NONE" if decodes is False else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _warn_of_others(batching: ContinuousBatchingConfig) -> None:
    defaults = vars(ContinuousBatchingConfig())
    names = vars(batching).keys() - HONOURED
    others = sorted(name for name in names if vars(batching)[name] != defaults.get(name))
    if others:
        warnings.warn(
            f"a session has no use for {', '.join(others)} of the ContinuousBatchingConfig; it "
            f"obeys {', '.join(sorted(HONOURED))}",
            stacklevel=4,
        )


def result_of(
    request_id: str,
    prompt: Sequence[int],
    end: Generation | BaseException,
    times: tuple[float, float],
    timestamps: list[float] | None = None,
    tokens: Sequence[int] = (),
) -> GenerationOutput:
    """A request's end in Transformers' form.

    Args:
        request_id, prompt: its own.
        end: its result, or the error that ended it.
        times: when it was queued and when it ended.
        timestamps: of its tokens.
        tokens: that it had when it ended by an error.
    """
    found = GenerationOutput(
        request_id=request_id,
        prompt_ids=list(prompt),
        created_time=times[0],
        lifespan=times,
        timestamps=timestamps,
    )
    if isinstance(end, BaseException):
        found.status, found.error = RequestStatus.FAILED, str(end)
        found.generated_tokens = list(tokens)
        return found
    found.status, found.generated_tokens = RequestStatus.FINISHED, end.token_ids
    if end.logprobs is not None:
        found.logprobs = drawn_logprobs(end)
    return found


def drawn_logprobs(result: Generation) -> list[float]:
    """Log-probabilities of the drawn tokens, which were asked for."""
    assert result.logprobs is not None, "they were asked for"
    pairs = zip(result.token_ids, result.logprobs, strict=True)
    return [found[token].logprob for token, found in pairs]
