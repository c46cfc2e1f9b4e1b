"""A capture that failed, ended so that torch, its pool and its generators can be used again.

An error inside a capture often invalidates it. `CUDAGraph.capture_end` then raises before it has
tidied up: both allocators go on recording into the pool, so that no other graph can use it; random
generators stay in capture mode, and draw nothing outside one; and the capture stream stays the
current one. Python cannot reach all of that state, but `capture_end` can: so the invalidated
capture is ended with the driver, an empty one begins in its place, and torch ends that.

Torch 2.11 needs it; later ones were not tried on a GPU. PyTorch's pull requests 180395, 171265 and
190308 repair parts. It can go when tests/gpu/graphs/test_capture_failures.py passes with
`graph.reset()` in its place.
"""

import contextlib
import warnings

import torch

from attn_ops.compat.cuda_driver import Status, driver


def end_failed_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """End the capture that `graph.capture_begin` began on `stream`, in whatever state it is."""
    handle = stream.cuda_stream
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        for _ in range(2):  # the first end fails where another stream has not joined again
            if driver().status(handle) is Status.INVALIDATED:
                driver().end(handle)
            if driver().status(handle) is Status.NONE:
                driver().begin(handle)
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
                break
        if driver().status(handle) is not Status.NONE:
            driver().end(handle)
    graph.reset()
    _forget_error(stream.device)


def _forget_error(device: torch.device) -> None:
    """The runtime keeps an error until it is asked for; the next launch would be blamed for it."""
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
            torch.cuda.synchronize(device)
            return
