"""`TrainedModel`: a session of a model that its owner trains or calls in between.

    with trained.session(num_requests, num_tokens) as session:
        session.generate(...)

Inside, the model is in eval mode with our attention; afterwards it is as it was. Weights that are
changed in place are seen. The session is kept, and made again where the model or the sizes are
others.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from attn_ops.integers import next_power_of_2
from attn_ops.integrations.transformers import NAME, keeping_attention, register
from graphs.options import SessionOptions
from graphs.sampling.params import check_bools
from graphs.session import DecodeSession

MOST_REQUESTS = 256
"""Requests that run at a time, where nobody says."""

TOKENS_STEP = 256
"""`max_tokens` is a multiple of it, so that prompts of other lengths seldom make a new session."""


class TrainedModel:
    """A model and its session.

    Args:
        model: of Transformers, compiled or not.
        options: of the session; default: `max_tokens` and `max_batch_size` that the first call
            needs, later ones more. And:
            compile: whether to compile a model that is not; default: where it is on a GPU.
            sleep: whether the cache's memory goes back between the calls; default: on a GPU.

    Raises:
        TypeError: an option is unknown.
        ValueError: the model has adapters that a session cannot run, or an option is no bool.
    """

    def __init__(self, model: torch.nn.Module, options: dict[str, Any]) -> None:
        self.original = original_of(model)
        self._options = dict(options)
        sizes = {"max_batch_size": 1, "max_tokens": 1}
        own = {name: options[name] for name in ("compile", "sleep") if name in options}
        check_bools(**own)
        SessionOptions.of(None, sizes | {k: v for k, v in options.items() if k not in own})
        self._compiled = model if hasattr(model, "_orig_mod") else None
        self._session: DecodeSession | None = None
        self._state: list[Any] = []  # options and places of weights, when the session was made
        self._is_held = False

    @contextlib.contextmanager
    def session(
        self, num_requests: int, num_tokens: int, **defaults: Any
    ) -> Iterator[DecodeSession]:
        """The session, inside the block, in this thread and without autocast.

        Args:
            num_requests: of the call.
            num_tokens: of its longest prompt and output together.
            defaults: options where the owner gave none.

        Raises:
            RuntimeError: another call or a manager holds the session.
            ValueError: the model is not supported, or an option is out of range.
        """
        with self.held(num_requests, num_tokens, **defaults) as session, self._exact():
            yield session

    @contextlib.contextmanager
    def held(self, num_requests: int, num_tokens: int, **defaults: Any) -> Iterator[DecodeSession]:
        """The same for steps of another thread; this one keeps its autocast."""
        if self._is_held:
            raise RuntimeError(
                "a model's session must be used by one call or manager at a time, got another one"
            )
        self._is_held = True
        try:
            with as_sessions_run(self.original):
                with self._exact():
                    session = self._fitting(num_requests, num_tokens, defaults)
                    session.wake()
                try:
                    yield session
                finally:
                    if self._sleeps and not session.num_unfinished:
                        session.sleep()
        finally:
            self._is_held = False

    @property
    def _on_gpu(self) -> bool:
        return next(self.original.parameters()).device.type == "cuda"

    @property
    def _sleeps(self) -> bool:
        return self._options.get("sleep", self._on_gpu)

    def _exact(self) -> torch.autocast:
        """Without autocast, which a session refuses."""
        return torch.autocast(next(self.original.parameters()).device.type, enabled=False)

    def _fitting(self, num_requests: int, num_tokens: int, defaults: dict[str, Any]) -> Any:
        options = {k: v for k, v in self._options.items() if k not in ("compile", "sleep")}
        sizes = self._sizes(num_requests, num_tokens)
        wanted = {**sizes, **defaults, **options}
        tensors = [*self.original.parameters(), *self.original.buffers()]
        state = [*sorted(defaults.items()), *((x.data_ptr(), x.dtype) for x in tensors)]
        session = self._session
        if session is not None and state == self._state and not _is_stale(session):
            fits = session.max_tokens >= num_tokens or "max_tokens" in options
            most = wanted["max_batch_size"]
            if fits and (session.max_batch_size >= most or "max_batch_size" in options):
                session.forget_prefixes()  # nobody sees weights that were written through `.data`
                return session
        if session is not None:  # no smaller than it was
            for name in sizes.keys() - options.keys() - defaults.keys():
                wanted[name] = max(wanted[name], getattr(session, name))
        self.close()
        wanted |= _sampled_seed(wanted) | _memory_of(wanted, self.original.device)
        wanted.setdefault("can_sleep", self._sleeps)
        self._session, self._state = DecodeSession(self._runnable(), **wanted), state
        return self._session

    def _sizes(self, num_requests: int, num_tokens: int) -> dict[str, int]:
        config = self.original.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        rounded = -(-num_tokens // TOKENS_STEP) * TOKENS_STEP
        return {
            "max_batch_size": min(next_power_of_2(num_requests), MOST_REQUESTS),
            "max_tokens": max(num_tokens, min(rounded, positions or rounded)),
        }

    def _runnable(self) -> torch.nn.Module:
        if self._compiled is None and self._options.get("compile", self._on_gpu):
            self._compiled = cast(Any, torch.compile(self.original, backend="attn_ops"))
        return self.original if self._compiled is None else self._compiled

    def close(self) -> None:
        """Give the session's memory back; the next call makes a new one."""
        if self._session is not None:
            self._session.release()
        self._session = None


def original_of(model: torch.nn.Module) -> Any:
    """The model of Transformers inside what compiles it, and inside peft's."""
    original: Any = getattr(model, "_orig_mod", model)
    if not hasattr(original, "get_base_model"):
        return original
    for name, config in original.peft_config.items():
        if config.is_prompt_learning:
            raise ValueError(
                f"adapters must act on layers, got {name!r}, a {type(config).__name__}, which puts "
                "rows in front of prompts; supported: LoRA and its kind"
            )
    return original.get_base_model()


def _sampled_seed(wanted: dict[str, Any]) -> dict[str, int]:
    """A seed of torch's generator, so that `torch.manual_seed` decides, where nobody names one."""
    return {} if "seed" in wanted else {"seed": int(torch.randint(2**31, ()))}


def _memory_of(wanted: dict[str, Any], device: torch.device) -> dict[str, float]:
    """`memory_fraction` for a cache that takes the fraction `free_memory` of what is free."""
    fraction = wanted.pop("free_memory", None)
    if fraction is None or device.type != "cuda" or "memory_fraction" in wanted:
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"memory_fraction": (total - (1 - fraction) * free) / total}


def _is_stale(session: DecodeSession) -> bool:
    """Whether hooks or adapters of its model are others than when it was made."""
    try:
        session.state.check(captured=True)
    except ValueError:
        return True
    return False


@contextlib.contextmanager
def as_sessions_run(model: Any) -> Iterator[None]:
    """The model in eval mode with our attention; as it was afterwards.

    The wrapper that accelerate puts around `forward` for mixed precision is off, too.
    """
    register()
    training = [module for module in model.modules() if module.training]
    wrapped = vars(model).pop("forward", None) if "_original_forward" in vars(model) else None
    try:
        for module in training:
            module.training = False
        with keeping_attention(model):
            model.set_attn_implementation(NAME)
            yield
    finally:
        for module in training:
            module.training = True
        if wrapped is not None:
            vars(model)["forward"] = wrapped
