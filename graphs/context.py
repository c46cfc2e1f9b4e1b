"""The surroundings in which a session makes its tensors and runs its steps, whoever calls it.

One thread at a time; ordinary tensors without gradients; the session's own device; what one CUDA
stream has is done before what the next one gets.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

Owner = TypeVar("Owner", bound=Any)
P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def surroundings(device: torch.device) -> Iterator[None]:
    """Ordinary tensors without gradients, on the session's own device.

    Tensors that are made in `torch.inference_mode()` cannot be written outside of it, and Dynamo
    compiles anew for it; streams, events and graphs belong to the device that is current.
    """
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), current:
        yield


class StreamOrder:
    """Orders the work of calls in different CUDA streams, as of different threads.

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
        self._last = stream  # last: what was interrupted is done again
        return True


def in_surroundings(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """A method that runs in the `surroundings` of its owner's `device`."""

    @functools.wraps(method)
    def inside(self: Owner, *args: P.args, **kwargs: P.kwargs) -> R:
        with surroundings(self.device):
            return method(self, *args, **kwargs)

    return inside


def exclusive(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """A method that holds its owner's `lock`, a `threading.RLock`: other threads wait.

    Raises:
        RuntimeError: this thread holds it already: a hook of the model calls the session that runs
            it. Half a step has no state that another could start from.
    """

    @functools.wraps(method)
    def alone(self: Owner, *args: P.args, **kwargs: P.kwargs) -> R:
        refuse_inside(self, method.__name__)
        with self.lock:
            return method(self, *args, **kwargs)

    return alone


def refuse_inside(owner: Any, name: str) -> None:
    """Raise a RuntimeError where this thread runs a step of `owner` already."""
    if owner.lock._is_owned():
        raise RuntimeError(
            f"{name}() must not be called from inside a step of the same session, as a hook of its "
            "model would"
        )
