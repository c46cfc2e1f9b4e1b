"""Python's garbage collector, paused where it does harm."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """No garbage collection inside the block.

    During capture a collection may free tensors of another pool and invalidate the graph; during
    compilation it walks the tracer's many live objects again and again and finds little.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
