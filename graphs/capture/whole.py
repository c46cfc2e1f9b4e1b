"""Whole steps as CUDA graphs: one graph, from the metadata to the tokens."""

import torch

from attn_ops import AttentionMetadata
from graphs.capture.pool import GraphPool, paused_collector
from graphs.capture.recorder import Builder, HostPlan, Step, plan_in_place


class WholeGraph:
    """One CUDA graph.

    Args:
        graph: captured.
        num_bytes, metadata, plan: see `Graph`.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        num_bytes: int,
        metadata: AttentionMetadata | None,
        plan: HostPlan | None,
    ) -> None:
        self.graph = graph
        self.num_bytes, self.metadata, self.plan = num_bytes, metadata, plan

    def replay(self, metadata: AttentionMetadata | None = None) -> None:
        """The graph has its own metadata."""
        self.graph.replay()


class WholeRecorder:
    """Records whole steps.

    Args:
        builder: of the backend; one that plans on the host does so before capture and replay.
        pool: the memory of all graphs.
    """

    def __init__(self, builder: Builder, pool: GraphPool) -> None:
        self.builder, self.pool = builder, pool

    def metadata(self, step: Step) -> AttentionMetadata | None:
        """Of a backend that plans on the host."""
        return self.builder.prepare_capture(step.common_on_host())

    def warm_up(self, step: Step, metadata: AttentionMetadata | None) -> None:
        """On the stream that is captured next."""
        self.pool.warm_up(lambda: step.run(metadata))

    def record(self, step: Step, metadata: AttentionMetadata | None) -> WholeGraph:
        """Capture the step; nothing runs."""
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with paused_collector(), self.pool.capturing(graph):
            step.run(metadata)
        num_bytes = torch.cuda.memory_reserved() - before
        return WholeGraph(graph, num_bytes, metadata, plan_in_place(self.builder, step, metadata))

    def release(self) -> None:
        """The pool's memory goes back to the device."""
        self.pool.release()
