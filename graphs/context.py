"""The surroundings in which a session makes its tensors and runs its steps, whoever calls it.

One thread at a time; ordinary tensors without gradients; the session's own device.
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
        if self.lock._is_owned():
            raise RuntimeError(
                f"{method.__name__}() must not be called from inside a step of the same session, "
                "as a hook of its model would"
            )
        with self.lock:
            return method(self, *args, **kwargs)

    return alone
