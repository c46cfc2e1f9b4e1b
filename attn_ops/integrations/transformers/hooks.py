"""Tells Dynamo where a model's hooks are: it guards on hooks that exist, not on their absence.

So compiled code of a model without hooks would also run in place of an equal model with some. A
guard on every module costs milliseconds a call (6 for 320 modules on a CPU, torch 2.13), so each
attention layer holds a text that is read where it is traced.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from attn_ops.integrations.transformers.keywords import KeywordCarrier

_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def mark_hooks(model: nn.Module, layers: Sequence[Any]) -> None:
    """Write into each attention layer where the model has hooks, and with which flags.

    Those that carry keywords do not count: a session adds them, to every equal model.
    """
    hooked = [
        f"{path}.{kind} {[key for key, ids in vars(module).items() if key in _FLAGS and i in ids]}"
        for path, module in model.named_modules()
        for kind in ("_forward_pre_hooks", "_forward_hooks")
        for i, hook in getattr(module, kind).items()
        if not isinstance(getattr(hook, "__self__", None), KeywordCarrier)
    ]
    for layer in layers:
        layer.places_of_hooks = "; ".join(hooked)


def guard_hooks(layer: Any) -> None:
    """Have Dynamo guard on what `mark_hooks` wrote: it does where a branch needs the value."""
    if getattr(layer, "places_of_hooks", "") == "unknown":
        raise AssertionError("mark_hooks writes no such text")
