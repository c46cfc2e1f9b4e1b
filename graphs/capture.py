"""Captured decode steps: one CUDA graph per batch size, all in one memory pool."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from attn_ops import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from graphs.batch import StepTensors
from graphs.collector import paused_collector
from graphs.modes import BatchDescriptor

logger = logging.getLogger(__name__)

RunStep = Callable[
    [StepTensors, BatchDescriptor, CommonAttentionMetadata, AttentionMetadata | None], torch.Tensor
]
"""Runs a padded decode step on the device tensors and returns the sampled tokens [S] int64.

The metadata is None where the step plans it itself, with device work only.
"""

Run = Callable[[], torch.Tensor]
"""A step with its arguments bound."""


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Launch it."""


class GraphRecorder(Protocol):
    """Makes graphs: of CUDA, and in tests of anything that can be run again."""

    def warm_up(self, run: Run) -> None:
        """Run once, unrecorded, for lazy initialisation."""

    def record(self, run: Run, sampling: bool) -> tuple[Graph, torch.Tensor, int]:
        """A graph, its output and the bytes it took; `sampling`: random numbers are drawn in it."""
        ...


class CUDARecorder:
    """CUDA graphs in one memory pool.

    Args:
        generator: random numbers drawn in a graph come from it.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None

    def warm_up(self, run: Run) -> None:
        """On the stream that records next."""
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()

    def record(self, run: Run, sampling: bool) -> tuple[Graph, torch.Tensor, int]:
        """Capture the step; nothing runs."""
        torch.cuda.empty_cache()  # as capture does: the difference below is then the graph's own
        before = torch.cuda.memory_reserved()
        graph: Any = torch.cuda.CUDAGraph()
        if sampling:
            graph.register_generator_state(self.generator)
        with paused_collector(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            tokens = run()
        return graph, tokens, torch.cuda.memory_reserved() - before


@dataclasses.dataclass
class CapturedStep:
    """One graph with the tensors it reads and writes, and the addresses it was captured with."""

    graph: Graph
    tensors: StepTensors
    tokens: torch.Tensor  # [S] int64, on the device
    addresses: tuple[int, ...]
    metadata: AttentionMetadata | None  # planned on the host; None: the graph plans itself


class DecodeGraphs:
    """Graphs of decode steps by `BatchDescriptor`.

    Args:
        run_step: the step; everything it launches is captured.
        allocate: makes the static tensors for a number of requests.
        batch_of: the batch that tensors hold; its maxima bound those of every replay.
        builder: of the backend; one that plans on the host is asked before capture and replay.
        inputs: every tensor besides the step's own that a graph reads by address (the KV caches).
        recorder: makes the graphs.
    """

    def __init__(
        self,
        run_step: RunStep,
        allocate: Callable[[int], StepTensors],
        batch_of: Callable[[StepTensors], CommonAttentionMetadata],
        builder: AttentionMetadataBuilder[AttentionMetadata],
        inputs: Callable[[], list[torch.Tensor]],
        recorder: GraphRecorder,
    ) -> None:
        self.run_step = run_step
        self.allocate = allocate
        self.batch_of = batch_of
        self.builder = builder
        self.inputs = inputs
        self.recorder = recorder
        self.num_bytes = 0
        self.seconds = 0.0
        self._captured: dict[BatchDescriptor, CapturedStep] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def get(self, key: BatchDescriptor) -> CapturedStep:
        """The graph of `key`, captured now if it is not there yet."""
        if key not in self._captured:
            self._captured[key] = self._capture(key)
        return self._captured[key]

    def replay(self, captured: CapturedStep) -> torch.Tensor:
        """Run a graph on what its tensors hold; returns the sampled tokens [S], on the device.

        The tensors' host side must hold the step too: a backend that plans on the host reads it.

        Raises:
            ValueError: a tensor that the graph reads has moved since the capture; nothing was run.
        """
        if self._addresses(captured.tensors) != captured.addresses:
            raise ValueError(
                "tensors of a captured step must stay where they were, got a KV cache or buffer "
                "at another address; make a new DecodeSession after replacing caches"
            )
        if captured.metadata is not None:
            self.builder.prepare_replay(captured.metadata, self.batch_of(captured.tensors))
        captured.graph.replay()
        return captured.tokens

    def release(self) -> None:
        """Drop every graph; the pool's memory goes back to the allocator."""
        self._captured.clear()
        self.num_bytes = 0

    def _addresses(self, tensors: StepTensors) -> tuple[int, ...]:
        return (tensors.device_bytes.data_ptr(), *(t.data_ptr() for t in self.inputs()))

    def _capture(self, key: BatchDescriptor) -> CapturedStep:
        """Run the step once for lazy initialisation, then record it.

        Its rows are padding: only the null block is written.
        """
        begin = time.perf_counter()
        tensors = self.allocate(key.num_reqs)
        tensors.upload()
        common = self.batch_of(tensors)
        metadata = self.builder.prepare_capture(common)

        def run() -> torch.Tensor:
            return self.run_step(tensors, key, common, metadata)

        self.recorder.warm_up(run)
        graph, tokens, num_bytes = self.recorder.record(run, key.sampling)
        self.num_bytes += num_bytes
        self.seconds += time.perf_counter() - begin
        logger.debug("captured %s", key)
        return CapturedStep(graph, tensors, tokens, self._addresses(tensors), metadata)
