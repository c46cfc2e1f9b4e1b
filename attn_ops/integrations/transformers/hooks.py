"""Tells Dynamo where a model has hooks, and classes whose calls were patched.

Dynamo guards on hooks that exist, not on their absence, and on classes, not on their functions. So
compiled code of a plain model would also run in place of an equal model with a hook or a patch. A
guard on every module costs milliseconds a call (6 for 320 modules on a CPU, torch 2.13), so each
attention layer holds a text that is read where it is traced.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from attn_ops.integrations.transformers.keywords import KeywordCarrier

_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def mark_hooks(model: nn.Module, layers: Sequence[Any]) -> None:
    """Write into each attention layer where the model has hooks and patched classes.

    Hooks that carry keywords do not count: a session adds them, to every equal model.
    """
    hooked = [
        f"{path}.{kind} {[key for key, ids in vars(module).items() if key in _FLAGS and i in ids]}"
        for path, module in model.named_modules()
        for kind in ("_forward_pre_hooks", "_forward_hooks")
        for i, hook in getattr(module, kind).items()
        if not isinstance(getattr(hook, "__self__", None), KeywordCarrier)
    ]
    patches = list(_patches(model))
    hooked += [f"{place} {id(function)} {id(function.__code__)}" for place, function in patches]
    for layer in layers:
        layer.places_of_hooks = "; ".join(hooked)
        if patches:
            layer.patched_functions = patches  # kept, so that no other gets their ids


def _patches(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """`forward` and `__call__` of the model's classes that are not those of their own source."""
    for kind in dict.fromkeys(map(type, model.modules())):
        for name in ("forward", "__call__"):
            function = getattr(kind, name)
            if hasattr(function, "__code__") and not _is_own(function, name, kind):
                yield f"{kind.__module__}.{kind.__qualname__}.{name}", function


def _is_own(function: Any, name: str, kind: type) -> bool:
    """Whether a class or a parent defines the function, or their package does, by a decorator."""
    if function is nn.Module.__call__:
        return True
    code = inspect.unwrap(function).__code__  # Transformers renames keywords by a decorator
    for parent in kind.__mro__:
        module = sys.modules.get(parent.__module__)
        top = sys.modules.get(parent.__module__.partition(".")[0])
        if code.co_qualname == f"{parent.__qualname__}.{name}":
            return code.co_filename == getattr(module, "__file__", code.co_filename)
        roots = [Path(path) for path in getattr(top, "__path__", ())]
        if any(root in Path(code.co_filename).parents for root in roots):
            return True
    return False


def guard_hooks(layer: Any) -> None:
    """Have Dynamo guard on what `mark_hooks` wrote: it does where a branch needs the value."""
    if getattr(layer, "places_of_hooks", "") == "unknown":
        raise AssertionError("mark_hooks writes no such text")
