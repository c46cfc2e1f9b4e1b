"""Marks of single parameters."""

from typing import Any

import pytest


def slow(*values: Any) -> list:
    """The values as parameters marked slow; a tuple has one for each name."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]
