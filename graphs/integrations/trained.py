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

from attn_ops.integrations.transformers import NAME, register
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
    """

    def __init__(self, model: torch.nn.Module, options: dict[str, Any]) -> None:
        options = dict(options)
        self.original = original_of(model)
        on_gpu = next(self.original.parameters()).device.type == "cuda"
        self._compiles = options.pop("compile", on_gpu)
        if options.pop("sleep", on_gpu):
            options["can_sleep"] = True
        self._callable = model if hasattr(model, "_orig_mod") else None
        self._options = options
        self._session: DecodeSession | None = None
        self._state: tuple[Any, ...] = ()  # of the model, when the session was made

    @contextlib.contextmanager
    def session(
        self, num_requests: int, num_tokens: int, **defaults: Any
    ) -> Iterator[DecodeSession]:
        """The session, inside the block.

        Args:
            num_requests: of the call.
            num_tokens: of its longest prompt and output together.
            defaults: options where the owner gave none.

        Raises:
            ValueError: the model is not supported, or an option is out of range.
        """
        with as_sessions_run(self.original):
            session = self._fitting(num_requests, num_tokens, defaults)
            session.wake()
            try:
                yield session
            finally:
                if self._options.get("can_sleep") and not session.num_unfinished:
                    session.sleep()

    def _fitting(self, num_requests: int, num_tokens: int, defaults: dict[str, Any]) -> Any:
        positions = getattr(self.original.config, "max_position_embeddings", None)
        rounded = -(-num_tokens // TOKENS_STEP) * TOKENS_STEP
        sizes = {
            "max_batch_size": min(1 << (num_requests - 1).bit_length(), MOST_REQUESTS),
            "max_tokens": max(num_tokens, min(rounded, positions or rounded)),
        }
        wanted = {**sizes, **defaults, **self._options}
        state = (*_state_of(self.original), *sorted(defaults.items()))
        session = self._session
        if session is not None and state == self._state and session.max_tokens >= num_tokens:
            enough = session.max_batch_size >= wanted["max_batch_size"]
            if enough or "max_batch_size" in self._options:
                return session
        if session is not None:  # no smaller than it was
            for name in sizes.keys() - self._options.keys() - defaults.keys():
                wanted[name] = max(wanted[name], getattr(session, name))
        self.close()
        wanted |= _sampled_seed(wanted) | _memory_of(wanted, self.original.device)
        self._session, self._state = DecodeSession(self._runnable(), **wanted), state
        return self._session

    def _runnable(self) -> torch.nn.Module:
        if self._callable is None:
            compiled: Any = torch.compile(self.original, backend="attn_ops")
            self._callable = compiled if self._compiles else self.original
        return cast(torch.nn.Module, self._callable)

    def close(self) -> None:
        """Give the session's memory back; the next call makes a new one."""
        if self._session is not None:
            self._session.release()
        self._session = None


def original_of(model: torch.nn.Module) -> Any:
    """The model of Transformers inside what compiles it, and inside peft's."""
    original: Any = getattr(model, "_orig_mod", model)
    return original.get_base_model() if hasattr(original, "get_base_model") else original


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


def _state_of(model: torch.nn.Module) -> tuple[Any, ...]:
    """Changes with the places of weights, hooks and adapters; not with the weights."""
    weights = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    names = ("_active_adapter", "_disable_adapters", "merged")
    adapters = [
        str([getattr(m, name) for name in names])
        for m in model.modules()
        if hasattr(m, "_active_adapter")
    ]
    return tuple(weights), sum(hooks), tuple(adapters)


@contextlib.contextmanager
def as_sessions_run(model: Any) -> Iterator[None]:
    """The model in eval mode with our attention, without autocast; as it was afterwards.

    The wrapper that accelerate puts around `forward` for mixed precision is off, too.
    """
    register()
    training = [module for module in model.modules() if module.training]
    implementation = model.config._attn_implementation
    wrapped = vars(model).pop("forward", None) if "_original_forward" in vars(model) else None
    try:
        for module in training:
            module.training = False
        if implementation != NAME:
            model.set_attn_implementation(NAME)
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        if implementation != NAME:
            model.set_attn_implementation(implementation)
        for module in training:
            module.training = True
        if wrapped is not None:
            vars(model)["forward"] = wrapped
