"""Two compiled forms of a piece: of steps that are called, and of steps that are replayed.

    with replayed(): model(...)  ->  the piece's replayed form, where it has one

A called step costs the host a launch a kernel, a replay one for all. So some passes gain in replays
what they lose in calls. Where one of them has the value "replays", the backend compiles a piece
twice, and each call takes the form that it wants. Their numbers differ by rounding: what is
compared bit by bit must be of one form.
"""

import contextlib
import contextvars
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attn_ops.ops.products.fused_products import takes_fused
from fx_passes.config import PassConfig

IN_REPLAYS = ("fused_mlp", "norm_products")
"""Passes that may be on in replays alone. Where nobody says otherwise, they are, on Hopper GPUs."""


class Calls(NamedTuple):
    """What calls of a model are for."""

    replayed: bool = False  # they want the form of replays
    captures: bool = False  # such calls are captured, too: what is compiled may have that form
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


def replayed() -> contextlib.AbstractContextManager[None]:
    """What is called inside is captured, or compared with what is captured."""
    return calls(replayed=True)


def config_of_calls(config: PassConfig) -> PassConfig:
    """The passes of a graph that is compiled for the calls that are made now."""
    return config.ordered() if config.batch_invariant or _calls.get().invariant else config


def config_of_replays(config: PassConfig, example_inputs: Sequence[Any]) -> PassConfig | None:
    """The passes of the replayed form of a graph with such inputs; None: there is one form."""
    if config.batch_invariant:
        return None
    asked = {"replays"}
    if _calls.get().captures and _has_kernels(example_inputs):
        asked.add("auto")
    wanted = [name for name in IN_REPLAYS if getattr(config, name) in asked]
    return dataclasses.replace(config, **dict.fromkeys(wanted, "always")) if wanted else None


def _has_kernels(example_inputs: Sequence[Any]) -> bool:
    """Whether there may be kernels for a weight among them."""
    tensors = (x for x in example_inputs if isinstance(x, torch.Tensor) and x.dim() == 2)
    plain = (x for x in tensors if not is_traceable_wrapper_subclass(x))
    return any(takes_fused(w.t(), w.device) for w in plain)


def copied(gm: GraphModule) -> GraphModule:
    """The same graph, to be compiled once more; attributes are shared."""
    return GraphModule(gm, copy.deepcopy(gm.graph))


def with_forms(called: Callable[..., Any], other: Callable[..., Any] | None) -> Callable[..., Any]:
    """What calls the form that is wanted; `called` itself where there is no other."""
    if other is None:
        return called

    def run(*args: Any) -> Any:
        return (other if _calls.get().replayed else called)(*args)

    run._boxed_call = getattr(called, "_boxed_call", False)  # pyright: ignore
    run.forms = (called, other)  # pyright: ignore
    return run


def counted(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The same, compiled with `batch_invariant`: its calls count."""

    def run(*args: Any) -> Any:
        if (told := _calls.get().counts) is not None:
            told[0] += 1
        return compiled(*args)

    run._boxed_call = getattr(compiled, "_boxed_call", False)  # pyright: ignore
    return run


def forms_of(compiled: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The form of calls, and that of replays if there is one."""
    return getattr(compiled, "forms", (compiled,))
