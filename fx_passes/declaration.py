"""What a class must declare to be a pass: checked when it is registered."""

import dis
import inspect
from typing import Any, get_args

from fx_passes.base import Pass, Stage


def check_pass(new: Any) -> None:
    """Refuse what could not run.

    Raises:
        TypeError: it is no class of `Pass`, is abstract, or its `apply` takes no graph or returns
            nothing.
        ValueError: its name, its stage or its token range cannot be used.
    """
    if not isinstance(new, type) or not issubclass(new, Pass):
        raise TypeError(f"pass must be a subclass of fx_passes.Pass, got {new!r}")
    if missing := sorted(new.__abstractmethods__):
        raise TypeError(f"pass must define {', '.join(missing)}, got {new!r} without")
    _check_names(new)
    _check_arguments(new)
    if _returns_nothing(new.apply):
        raise TypeError(
            f"apply of the pass {new.name!r} must return its number of matches, an int, got None"
        )


def _check_names(new: type[Pass]) -> None:
    name, stage = getattr(new, "name", None), getattr(new, "stage", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"name of a pass must be an identifier, as my_pass, got {name!r} in {new!r}"
        )
    if stage not in get_args(Stage):
        raise ValueError(
            f"stage of the pass {name!r} must be known, got {stage!r}; "
            f"supported: {', '.join(get_args(Stage))}"
        )
    for attribute in ("runs_before", "runs_after"):
        anchor = getattr(new, attribute)
        if not isinstance(anchor, str | None):
            raise TypeError(
                f"{attribute} of the pass {name!r} must be a pass's name or None, got {anchor!r}"
            )
    check_token_range(new.token_range, name)


def check_token_range(counts: Any, name: str) -> None:
    """Refuse what is no range of token counts.

    Raises:
        TypeError: it is no range and not None.
        ValueError: it is empty, negative, or leaves counts out.
    """
    if counts is None:
        return
    if not isinstance(counts, range):
        raise TypeError(f"token_range of the pass {name!r} must be a range or None, got {counts!r}")
    if counts.step != 1 or counts.start < 0 or not counts:
        raise ValueError(
            f"token_range of the pass {name!r} must be range(least, most + 1), got {counts!r}"
        )


def _check_arguments(new: type[Pass]) -> None:
    """`apply` can be called with a graph."""
    method: Any = inspect.getattr_static(new, "apply")
    bound = not isinstance(method, staticmethod | classmethod)
    try:
        inspect.signature(new.apply).bind(*[None] * bound, None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"apply of the pass {new.name!r} must take a graph, as apply(self, graph), "
            f"got {new.apply!r}: {error}"
        ) from error


def _returns_nothing(function: Any) -> bool:
    """Whether every return of a Python function returns None, as it is without a `return`."""
    if not inspect.isfunction(function) or inspect.isgeneratorfunction(function):
        return inspect.isgeneratorfunction(function)
    before, values = None, []
    for step in dis.get_instructions(function):
        if step.opname == "RETURN_VALUE":
            alone = before and before.opname == "LOAD_CONST" and not step.is_jump_target
            values.append(before.argval if before and alone else ...)
        elif step.opname == "RETURN_CONST":
            values.append(step.argval)
        before = step
    return bool(values) and all(value is None for value in values)
