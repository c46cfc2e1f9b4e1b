"""What a step in pieces is recorded into: segments, each a CUDA graph, one after the other."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from graphs.capture.pool import GraphPool


class Segment(Protocol):
    """What was recorded between two calls; it also keeps the pool's memory from being returned."""

    @property
    def is_empty(self) -> bool:
        """Nothing was launched in it; known when it has ended."""
        ...

    def replay(self) -> None:
        """Launch it."""


class SegmentRecorder(Protocol):
    """Makes segments: of CUDA, and in tests of anything that can be run again."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once, unrecorded, for lazy initialisation."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Around all segments of a step."""
        ...

    def segment(self) -> contextlib.AbstractContextManager[Segment]:
        """Record what runs inside; afterwards nothing is recorded, also where this raises."""
        ...

    def num_bytes(self) -> int:
        """Memory that is taken now."""
        ...

    def release(self) -> None:
        """Give back the memory of all segments; none of them is alive."""


class CUDASegment:
    """One CUDA graph."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.is_empty = False

    def replay(self) -> None:
        self.graph.replay()


class CUDASegments:
    """CUDA graphs in one memory pool, captured on its stream.

    Args:
        pool: shared with other graphs that are not replayed at the same time.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool

    def warm_up(self, run: Callable[[], object]) -> None:
        self.pool.warm_up(run)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        _ = self.pool.handle  # the pool captures something itself when it is new
        torch.cuda.synchronize()
        with self.pool.on_stream():
            yield

    @contextlib.contextmanager
    def segment(self) -> Iterator[CUDASegment]:
        segment = CUDASegment()
        with contextlib.ExitStack() as capture:
            capture.enter_context(self.pool.capturing(segment.graph))
            yield segment
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                capture.close()
        for w in caught:
            if "Graph is empty" in str(w.message):  # torch says it in no other way
                segment.is_empty = True
            else:
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)

    def num_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def release(self) -> None:
        self.pool.release()
