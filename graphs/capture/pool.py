"""Captures that end whatever is raised in them, and the memory pool they share.

An error inside a capture often invalidates it. In torch 2.11 `CUDAGraph.capture_end` then raises
before it has tidied up: both allocators go on recording into the pool, so that no other graph can
use it; random generators stay in capture mode, and draw nothing outside one; and the capture
stream stays the current one. (PyTorch's pull requests 180395 and 171265 repair parts of this.)

Python cannot reach all of that state, but `capture_end` can: so the invalidated capture is ended
with the driver, an empty one begins in its place, and torch ends that without an error.
"""

import contextlib
import ctypes
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, ClassVar

import torch


class Status(IntEnum):
    """What a stream does, in the driver's numbers."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


class Driver:
    """Calls of the CUDA driver that torch does not offer. Streams are handles."""

    def __init__(self) -> None:
        self._cuda: Any = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")

    def status(self, stream: int) -> Status:
        """Whether the stream is capturing; `torch.cuda` cannot tell a capture that is invalid."""
        value = ctypes.c_int()
        self._call("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(value))
        return Status(value.value)

    def begin(self, stream: int) -> None:
        """Begin a capture that minds its own thread only."""
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(1))

    def end(self, stream: int) -> None:
        """End a capture, valid or not; what it recorded is dropped."""
        graph = ctypes.c_void_p()
        self._cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        if graph.value:
            self._call("cuGraphDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} of the CUDA driver returned {code}")


@functools.cache
def driver() -> Driver:
    """The driver, loaded when it is first needed: there is none on a machine without a GPU."""
    return Driver()


def is_invalidated() -> bool:
    """Whether the current stream's capture can no longer become a graph."""
    if not torch.cuda.is_initialized():
        return False
    return driver().status(torch.cuda.current_stream().cuda_stream) is Status.INVALIDATED


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    pool: tuple[int, int] | None,
    stream: torch.cuda.Stream,
    capture_error_mode: str = "thread_local",
) -> Iterator[None]:
    """Record what is launched inside the block; unlike `torch.cuda.graph`, safe to fail in.

    After an error `graph` is empty, and the stream, the pool and the generators are as before.
    Caches of the allocator are not emptied, which would make each capture allocate its memory anew.

    Args:
        graph: new or reset.
        pool: of which a graph is alive, or that is new (`GraphPool` sees to that); None: its own.
        stream: any but the default one; the same for all graphs of a pool.
        capture_error_mode: `thread_local` lets other threads call CUDA during the capture.

    Raises:
        RuntimeError: the stream is capturing already; or the capture was invalidated and nobody
            said so, because the error was caught on the way.
    """
    if driver().status(stream.cuda_stream) is not Status.NONE:
        raise RuntimeError("stream must not be capturing, got one that is")
    torch.cuda.synchronize(stream.device)
    more: dict[str, Any] = {} if pool is None else {"pool": pool}
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=capture_error_mode, **more)
        try:
            yield
            if driver().status(stream.cuda_stream) is Status.INVALIDATED:
                raise RuntimeError(
                    "capture must stay valid to its end, got one that a forbidden call had "
                    "invalidated without raising"
                )
            graph.capture_end()
        except BaseException as error:
            try:
                _end_failed_capture(graph, stream)
            except RuntimeError as lasting:  # the device is lost; what went before says why
                error.add_note(f"The capture could not be ended: {lasting}")
            raise


def _end_failed_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
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


class GraphPool:
    """One memory pool for all graphs, and the stream on which they are captured.

    A graph of one kernel lives as long as the pool. Without it the allocator would retire the pool
    with the last graph, a failed first one included, and refuse the next capture in it.

    Streams of released pools are used again: cuBLAS keeps 32 MiB for every stream it has run on
    (H200, torch 2.11).
    """

    _unused: ClassVar[dict[torch.device, list[torch.cuda.Stream]]] = {}

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._word = torch.zeros(1, device="cuda")
        self._handle: tuple[int, int] | None = None
        self._anchor = torch.cuda.CUDAGraph()

    @property
    def stream(self) -> torch.cuda.Stream:
        """The pool's own until `release`: graphs of one stream share cuBLAS's workspace."""
        if self._stream is None:
            unused = self._unused.setdefault(self._word.device, [])
            self._stream = unused.pop() if unused else torch.cuda.Stream(self._word.device)
        return self._stream

    @property
    def handle(self) -> tuple[int, int]:
        """For `capture_begin`; another one after `release`."""
        if self._handle is None:
            handle = torch.cuda.graph_pool_handle()
            with capturing(self._anchor, handle, self.stream):
                self._word.zero_()
            self._handle = handle
        return self._handle

    def capturing(self, graph: torch.cuda.CUDAGraph) -> contextlib.AbstractContextManager[None]:
        """`capturing` in this pool."""
        return capturing(graph, self.handle, self.stream)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run on the pool's stream, behind what the current stream has and before what it gets."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once on the stream that is captured: libraries have workspaces for each stream."""
        with self.on_stream():
            run()
        torch.cuda.synchronize()

    def release(self) -> None:
        """Give back the memory, and the stream, of a pool whose graphs and outputs are gone."""
        if self._stream is None and self._handle is None:
            return  # whole graphs and pieces share a pool, and each gives it back
        if self._stream is not None:
            self._unused[self._word.device].append(self._stream)
            self._stream = None
        self._anchor.reset()
        self._handle = None
        torch.cuda.empty_cache()


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
