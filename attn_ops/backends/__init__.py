"""Attention backends and their selection. A backend's kernels are imported when it is selected."""

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.registry import (
    Selection,
    backend_names,
    get_backend,
    register_backend,
    select_backend,
)

__all__ = [
    "Backend",
    "Selection",
    "Support",
    "backend_names",
    "get_backend",
    "register_backend",
    "select_backend",
]
