"""The memory pool of all graphs, and captures in it, which end whatever they raise."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from attn_ops.compat.cuda_driver import Status, driver
from attn_ops.compat.failed_capture_until_2_16 import end_failed_capture


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
        RuntimeError: the stream is capturing already; or the capture was invalidated by an error
            that was caught inside the block.
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
                end_failed_capture(graph, stream)
            except RuntimeError as lasting:  # the device is lost; what went before says why
                error.add_note(f"The capture could not be ended: {lasting}")
            raise


class GraphPool:
    """One memory pool for all graphs, and the stream on which they are captured.

    A graph of one kernel lives as long as the pool. Without it the allocator would retire the pool
    with the last graph, a failed first one included, and refuse the next capture in it.
    """

    _unused: ClassVar[dict[torch.device, list[torch.cuda.Stream]]] = {}
    """Streams of pools that were released or collected, used again by new ones.

    Global: cuBLAS keeps 32 MiB for every stream it has run on, whoever owned it (H200, torch 2.11).
    """

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
            stream = unused.pop() if unused else torch.cuda.Stream(self._word.device)
            self._stream = stream
            self._given_back = weakref.finalize(self, unused.append, stream)
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
            self._given_back()
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
