"""Compiling in tests."""

import contextlib
from collections.abc import Iterator

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config


@contextlib.contextmanager
def graphs_are_compiled_anew() -> Iterator[None]:
    """No graph comes from a cache, so its code is seen. Equal C++ is not built again (7 s each)."""
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
