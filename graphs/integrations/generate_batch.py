"""Transformers' continuous batching on a session: `enable(model)`, then `model.generate_batch`.

Arguments and results are those of Transformers. TRL's `use_transformers_continuous_batching` runs
on it unchanged.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from graphs.integrations.batching import Asked, result_of
from graphs.integrations.manager import Manager
from graphs.integrations.trained import TrainedModel, original_of
from graphs.requests.results import Generation, RequestError
from graphs.session import DecodeSession

METHODS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def enable(model: torch.nn.Module, **options: Any) -> None:
    """Give a model the methods of `METHODS`, of ours.

    Args:
        model: of Transformers, compiled or not, with any attention implementation; it may be
            trained between the calls.
        options: of `TrainedModel`, which come before what a `ContinuousBatchingConfig` asks for.

    Raises:
        ValueError: the model is none of Transformers.
    """
    original = original_of(model)
    if not callable(getattr(original, "set_attn_implementation", None)):
        raise ValueError(f"model must be a model of Transformers, got {type(original).__name__}")
    methods = Methods(model, options)
    for name in METHODS:
        setattr(original, name, _Method(methods, name))


def disable(model: torch.nn.Module) -> None:
    """Take them away: the model has those of Transformers again."""
    original = original_of(model)
    for name in METHODS:
        method = vars(original).pop(name, None)
        if method is not None:
            method.methods.trained.close()


@dataclasses.dataclass
class _Method:
    """A bound method that a copy of the model binds to itself."""

    methods: "Methods"
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.methods, self.name)(*args, **kwargs)


class Methods:
    """Those that `enable` gives a model."""

    def __init__(self, model: torch.nn.Module, options: dict[str, Any]) -> None:
        self._options = options
        self.trained = TrainedModel(model, options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Methods":
        """Those of the copied model; it has its own session."""
        model = memo.get(id(self.trained.original), self.trained.original)
        found = memo[id(self)] = Methods(model, self._options)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Methods, (self.trained.original, self._options)

    @torch.no_grad()
    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Generate for token ids; see Transformers' `generate_batch`.

        Args:
            persistent_manager, warmup: change nothing; the session is always kept.
            kwargs: of all requests, as those of `DecodeSession.add`.

        Returns:
            By request id: "req_0" of the first prompt; where `num_return_sequences` asks for more,
            "req_0__child#0" and so on before it. A request that failed has an `error`.
        """
        inputs = inputs.tolist() if isinstance(inputs, torch.Tensor) else inputs
        if not len(inputs):
            return {}
        asked = Asked.of(self.trained.original, generation_config, continuous_batching_config)
        wanted = asked.wanted | kwargs
        longest = asked.longest(inputs, wanted)
        total = len(inputs) * asked.num_samples
        with self.trained.session(total, longest, **asked.options) as session:
            requests = [
                (name, list(prompt))
                for number, prompt in enumerate(inputs)
                for name in asked.names(f"req_{number}")
            ]
            bar = tqdm(desc="generate_batch", unit="request", total=total, disable=not progress_bar)
            with bar:
                seeded = [asked.seeded(wanted, number) for number in range(total)]
                return _run(session, requests, seeded, bar, timed=record_timestamps)

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Manager:
        """A manager, to be started; see Transformers' `init_continuous_batching`."""
        asked = Asked.of(self.trained.original, generation_config, continuous_batching_config)
        return Manager(self.trained, asked, workload_hints)

    @contextlib.contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: Any = None,
    ) -> Iterator[Manager]:
        """A running manager inside the block."""
        manager = self.init_continuous_batching(
            generation_config, continuous_batching_config, workload_hints
        )
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=block, timeout=timeout)


def _run(
    session: DecodeSession,
    requests: list[tuple[str, list[int]]],
    wanted: list[dict[str, Any]],
    bar: Any,
    *,
    timed: bool,
) -> dict[str, GenerationOutput]:
    """Results by name, in order. A request that ends by its own error does not end the others."""
    begin = time.perf_counter()
    ids: list[int] = []
    ends: dict[int, tuple[Generation | RequestError, float]] = {}
    stamps: dict[int, list[float]] = {}
    try:
        for (_, prompt), own in zip(requests, wanted, strict=True):
            ids.append(session.add(prompt, **own))
        while len(ends) < len(ids):
            try:
                outputs = session.step()
            except RequestError as error:
                ends[error.request_id] = error, time.perf_counter()
                bar.update()
                continue
            now = time.perf_counter()
            for output in outputs:
                stamps.setdefault(output.request_id, []).append(now)
                if output.finish_reason:
                    end = session.result(output.request_id)
                    assert end is not None, "it has ended"
                    ends[output.request_id] = end, now
                    bar.update()
    finally:  # also when interrupted: nothing of this call is left
        for request in ids:
            session.discard(request)
    return {
        name: result_of(
            name, prompt, ends[i][0], (begin, ends[i][1]), stamps.get(i, []) if timed else None
        )
        for (name, prompt), i in zip(requests, ids, strict=True)
    }
