"""How a session's methods run: one at a time, in their own surroundings, and whole.

A method refuses to run beside another one. Its tensors are ordinary ones on the session's device.
Its work on a CUDA stream follows what the last stream was given. Ctrl-C waits for a step's end.
"""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

Owner = TypeVar("Owner", bound=Any)
P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def surroundings(device: torch.device) -> Iterator[None]:
    """Make ordinary tensors without gradients, on the session's own device.

    Tensors that are made in `torch.inference_mode()` cannot be written outside of it, and Dynamo
    compiles again for it; streams, events and graphs belong to the device that is current.
    """
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), current:
        yield


def exclusive(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """Run a method in its owner's `surroundings`, with its `lock`, behind its `_begin`.

    Raises:
        RuntimeError: another thread runs such a method, or a hook or an observer calls the session
            whose step it is part of.
    """

    @functools.wraps(method)
    def alone(self: Owner, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.lock.locked():
            raise RuntimeError(
                f"{method.__name__}() must be called by one thread at a time, and not from inside "
                "of a step, got a call while another runs; supported: graphs.AsyncSession"
            )
        with self.lock, surroundings(self.device):
            self._begin(method.__name__, args, kwargs)
            return method(self, *args, **kwargs)

    return alone


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C (SIGINT) until the block ends, so that it leaves nothing half done.

    Signals reach the main thread alone, so in others there is nothing to hold.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


class StreamOrder:
    """Orders the work of calls in different CUDA streams.

    A call may leave steps that run. They use tensors that the next call uses, too.

    Args:
        device: of the tensors, which the current stream has made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def changed(self) -> bool:
        """Whether the current stream is another one than before; then it waits for that one.

        Tensors that were freed go back to the stream that made them. So nothing that the other
        stream has made and frees may be used from here on.
        """
        if self._last is None:
            return False
        # 0.1 us; current_stream() takes ten times that.
        if torch._C._cuda_getCurrentRawStream(self._device.index) == self._last.cuda_stream:
            return False
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._last)
        self._last = stream
        return True
