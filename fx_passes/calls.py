"""What the calls of a model are for, told to the backend that compiles them.

    with calls(captures=True): model(...)  ->  compiled for replays

A called step costs the host a launch a kernel, a replay one for all. So some passes gain where
steps are captured what they lose in calls of few rows.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attn_ops.ops.products.fused_products import takes_fused
from fx_passes.config import PassConfig

IN_REPLAYS = ("fused_mlp", "norm_products")
"""Passes that "auto" turns on for models whose steps are captured, on Hopper GPUs."""


class Calls(NamedTuple):
    """What calls of a model are for."""

    captures: bool = False  # most are captured: what is compiled may be what replays want
    invariant: bool = False  # what is compiled must have rows that do not depend on each other
    counts: list[int] | None = None  # its first number counts calls of what is compiled so


_ORDINARY = Calls()
_calls: contextvars.ContextVar[Calls] = contextvars.ContextVar("attn_ops_calls", default=_ORDINARY)
"""Of calls that are made now. Global: torch hands compiled code and backends nothing else."""


@contextlib.contextmanager
def calls(**purpose: Any) -> Iterator[None]:
    """Calls inside are for what fields of `Calls` say."""
    token = _calls.set(_calls.get()._replace(**purpose))
    try:
        yield
    finally:
        _calls.reset(token)


def config_of_calls(
    config: PassConfig, example_inputs: Sequence[Any]
) -> tuple[PassConfig, dict[str, Any]]:
    """The passes of a graph with such inputs, for the calls that are made now.

    Besides, options of Inductor that a user's own replace.
    """
    if config.batch_invariant or _calls.get().invariant:
        return config.ordered(), {}
    if not _calls.get().captures or not _has_kernels(example_inputs):
        return config, {}
    auto = [name for name in IN_REPLAYS if getattr(config, name) == "auto"]
    config = dataclasses.replace(config, **dict.fromkeys(auto, "always"))  # type: ignore
    used = any(getattr(config, name) == "always" for name in IN_REPLAYS)
    return config, {"combo_kernels": True} if used else {}


def _has_kernels(example_inputs: Sequence[Any]) -> bool:
    """Whether there may be kernels for a weight among them."""
    tensors = (x for x in example_inputs if isinstance(x, torch.Tensor) and x.dim() == 2)
    plain = (x for x in tensors if not is_traceable_wrapper_subclass(x))
    return any(takes_fused(w.t(), w.device) for w in plain)


def counted(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The same, compiled with `batch_invariant`: its calls count."""

    def run(*args: Any) -> Any:
        if (told := _calls.get().counts) is not None:
            told[0] += 1
        return compiled(*args)

    run._boxed_call = getattr(compiled, "_boxed_call", False)  # pyright: ignore
    return run
