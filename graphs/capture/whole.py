"""What makes graphs of steps: CUDA graphs in one memory pool, or plain calls for debugging."""

from collections.abc import Callable
from typing import Protocol

import torch

from attn_ops import AttentionMetadata
from attn_ops.ops.breaks import AttentionCall, around_attention
from graphs.capture.pool import GraphPool, paused_collector

Run = Callable[[], None]
"""A step with its arguments bound; it leaves its results in the step's tensors."""


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Launch it."""


class GraphRecorder(Protocol):
    """Makes graphs: of CUDA, and in tests of anything that can be run again."""

    def warm_up(self, run: Run) -> None:
        """Run once, unrecorded, for lazy initialisation."""

    def record(self, run: Run) -> tuple[Graph, int]:
        """A graph and the bytes it took."""
        ...

    def release(self) -> None:
        """Give the pool's memory back; no graph of it is alive."""


class CUDARecorder:
    """CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self.pool = GraphPool()

    def warm_up(self, run: Run) -> None:
        """On the stream that records next."""
        stream = self.pool.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def record(self, run: Run) -> tuple[Graph, int]:
        """Capture the step; nothing runs."""
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with paused_collector(), self.pool.capturing(graph):
            run()
        return graph, torch.cuda.memory_reserved() - before

    def release(self) -> None:
        """The pool's memory goes back to the device; no graph of it may be alive."""
        self.pool.release()


class RerunRecorder:
    """Runs a step's Python again instead of replaying a graph: `debug="eager_replay"`.

    Everything around the graph is as in a capture: padding, static tensors, checks.
    """

    def warm_up(self, run: Run) -> None:
        run()

    def record(self, run: Run, key: object = None) -> tuple[Graph, int]:
        return Rerun(run), 0

    def breaks_all(self, key: object) -> bool:
        """As pieces of a step: every call of attention takes the metadata of the replay."""
        return True

    def release(self) -> None:
        """There is nothing to give back."""


class Rerun:
    """A step that runs again."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def replay(self, metadata: AttentionMetadata | None = None) -> None:
        """`metadata` takes the place of the captured step's in every call of attention."""
        if metadata is None:
            self.run()
            return

        def replaced(call: AttentionCall) -> tuple[torch.Tensor, ...]:
            return call.run(metadata)

        with around_attention(replaced):
            self.run()
