"""The plug-in for vLLM: our attention as its backend `CUSTOM`.

Entry point `vllm.general_plugins`; vLLM is imported by what vLLM calls, never by `import attn_ops`.
"""

import logging
from collections.abc import Callable
from typing import Any

from attn_ops.backends import get_backend

logger = logging.getLogger(__name__)

PREFERRED = "PREFERRED"
"""In place of a backend's name: for each group of layers the first that takes it, by our order."""

CLASS_PREFIX = "AttnOps_"
"""Of a class's name in `backend`, before the backend's name."""


def register(backend: str | None = None) -> None:
    """Make `--attention-backend CUSTOM` run our attention; a later call replaces an earlier one.

    Args:
        backend: name of the backend that computes, ours or one registered with us; None: for each
            group of layers the first of our order of preference that takes it.

    Raises:
        ValueError: the name is not known.
        ImportError: this version of vLLM knows no `CUSTOM`.
    """
    name = backend or PREFERRED
    if name != PREFERRED:
        get_backend(name)  # raises where there is none
    custom, register_backend = _registry()
    # vLLM wants a path and looks the class up by it, in each of its processes.
    register_backend(custom, f"{__name__}.backend.{CLASS_PREFIX}{name}")


def plugin() -> None:
    """What vLLM calls in every process: `register()`, unless another plug-in has taken `CUSTOM`.

    It raises nothing: vLLM would not start wherever we are installed beside a version without it.
    """
    try:
        custom, _ = _registry()
    except ImportError as error:
        logger.warning("attn_ops is not available as CUSTOM in this vLLM: %s", error)
        return
    if not custom.is_overridden():
        register()


def _registry() -> tuple[Any, Callable[..., Any]]:
    """`AttentionBackendEnum.CUSTOM` and `register_backend`; an ImportError without either."""
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    if not hasattr(AttentionBackendEnum, "CUSTOM"):
        raise ImportError("AttentionBackendEnum has no CUSTOM")
    return AttentionBackendEnum.CUSTOM, register_backend
