"""Checks of arguments: each raises a ValueError that names the argument and its value."""

from collections.abc import Sequence
from typing import Any


def check_positive(**arguments: Any) -> None:
    """Raise a ValueError for the first argument that is no positive int."""
    for name, value in arguments.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")


def check_ints(**arguments: Any) -> None:
    """Raise a ValueError for the first argument that is no int."""
    for name, value in arguments.items():
        if type(value) is not int:
            raise ValueError(f"{name} must be an int, got {value!r}")


def check_bools(**arguments: Any) -> None:
    """Raise a ValueError for the first argument that is no bool."""
    for name, value in arguments.items():
        if type(value) is not bool:
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_known(name: str, value: Any, known: Sequence[str | bool | None]) -> None:
    """Raise a ValueError if `value` is not among those that are known."""
    if value not in known:
        supported = ", ".join(map(str, known))
        raise ValueError(f"{name} must be known, got {value!r}; supported: {supported}")
