"""Attention backends and their selection. A backend's kernels are imported when it is selected."""

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.backends.grouped import grouped_backend
from attn_ops.backends.registry import (
    Selection,
    backend_names,
    get_backend,
    register_backend,
    select_backend,
)

__all__ = [
    "AttentionOptions",
    "Backend",
    "Selection",
    "Support",
    "backend_names",
    "get_backend",
    "grouped_backend",
    "register_backend",
    "select_backend",
]
