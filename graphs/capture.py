"""Captured decode steps: one CUDA graph per batch size, all in one memory pool."""

import dataclasses
import logging
import time
from collections.abc import Callable

import torch

from graphs.batch import StepTensors
from graphs.collector import paused_collector
from graphs.modes import BatchDescriptor

logger = logging.getLogger(__name__)

RunStep = Callable[[StepTensors, BatchDescriptor], torch.Tensor]
"""Runs a padded decode step on the device tensors and returns the sampled tokens [S] int64."""


@dataclasses.dataclass
class CapturedStep:
    """One graph with the tensors it reads and writes, and the addresses it was captured with."""

    graph: "torch.cuda.CUDAGraph"
    tensors: StepTensors
    tokens: torch.Tensor  # [S] int64, on the device
    addresses: tuple[int, ...]


class DecodeGraphs:
    """Graphs of decode steps by `BatchDescriptor`.

    Args:
        run_step: the step; everything it launches is captured, metadata planning included.
        allocate: makes the static tensors for a number of requests.
        inputs: every tensor besides the step's own that a graph reads by address (the KV caches).
        generator: random numbers drawn in a graph come from it.
    """

    def __init__(
        self,
        run_step: RunStep,
        allocate: Callable[[int], StepTensors],
        inputs: Callable[[], list[torch.Tensor]],
        generator: torch.Generator,
    ) -> None:
        self.run_step = run_step
        self.allocate = allocate
        self.inputs = inputs
        self.generator = generator
        self.num_bytes = 0
        self.seconds = 0.0
        self._captured: dict[BatchDescriptor, CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._captured)

    def get(self, key: BatchDescriptor) -> CapturedStep:
        """The graph of `key`, captured now if it is not there yet."""
        if key not in self._captured:
            self._captured[key] = self._capture(key)
        return self._captured[key]

    def replay(self, captured: CapturedStep) -> torch.Tensor:
        """Run a graph on what its tensors hold; returns the sampled tokens [S], on the device.

        Raises:
            ValueError: a tensor that the graph reads has moved since the capture; nothing was run.
        """
        if self._addresses(captured.tensors) != captured.addresses:
            raise ValueError(
                "tensors of a captured step must stay where they were, got a KV cache or buffer "
                "at another address; make a new DecodeSession after replacing caches"
            )
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
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run_step(tensors, key)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as capture does: the difference below is then the graph's own
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        if key.sampling:
            graph.register_generator_state(self.generator)
        with paused_collector(), torch.cuda.graph(graph, pool=self._pool, stream=stream):
            tokens = self.run_step(tensors, key)
        self.num_bytes += torch.cuda.memory_reserved() - before
        self.seconds += time.perf_counter() - begin
        logger.debug("captured %s", key)
        return CapturedStep(graph, tensors, tokens, self._addresses(tensors))
