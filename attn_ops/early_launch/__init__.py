"""Whether kernels are launched before the ones in front of them have ended.

CUDA calls it programmatic dependent launch: the next kernel is set up while the last one runs, and
waits before it reads (docs/graphs.md). torch only; `triton.launch` has what kernels call.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator

import torch

_in_turn: contextvars.ContextVar[bool] = contextvars.ContextVar("attn_ops_in_turn", default=False)
"""Global: an operator is called with nothing of who compiled the model that calls it."""


# Cached: a property of the device, asked by each launch.
@functools.cache
def why_not_early(device: torch.device) -> str | None:
    """What `device` lacks to launch kernels early; None: nothing."""
    if device.type != "cuda":
        return f"a device of type {device.type}: only CUDA can"
    if torch.version.hip is not None:
        return "ROCm, which cannot"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 9 else f"a GPU of capability {major}.{minor}: from 9.0 on they can"


@contextlib.contextmanager
def launched_in_turn() -> Iterator[None]:
    """Inside the block kernels of ours are launched one after the other has ended."""
    token = _in_turn.set(True)
    try:
        yield
    finally:
        _in_turn.reset(token)


def is_in_turn() -> bool:
    """Whether `launched_in_turn` is open."""
    return _in_turn.get()
