"""Captured steps by their keys: captured once, checked and replayed."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from attn_ops import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from graphs.capture.addresses import AddressBook
from graphs.capture.failures import CaptureError, diagnosing
from graphs.capture.whole import Graph, GraphRecorder
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.step.tensors import StepTensors

logger = logging.getLogger(__name__)


class RunStep(Protocol):
    """Runs a padded step on its device tensors, which hold its results afterwards.

    `metadata` is None where the step plans it itself, with device work only.
    """

    def __call__(
        self,
        tensors: StepTensors,
        key: BatchDescriptor,
        common: CommonAttentionMetadata,
        metadata: AttentionMetadata | None,
    ) -> None: ...


@dataclasses.dataclass(eq=False)
class CapturedStep:
    """One graph with the tensors it reads and writes, and the addresses it was captured with."""

    key: BatchDescriptor
    mode: CUDAGraphMode  # FULL or PIECEWISE
    graph: Graph
    tensors: StepTensors
    book: AddressBook  # of inputs
    weights: AddressBook
    metadata: AttentionMetadata | None  # planned on the host; None: the graph plans itself
    num_bytes: int
    seconds: float
    num_replays: int = 0

    @property
    def needs_host(self) -> bool:
        """The host plans every replay: none may follow another without it."""
        return self.metadata is not None or self.mode is CUDAGraphMode.PIECEWISE


class StepGraphs:
    """Graphs of steps by `BatchDescriptor`.

    Args:
        run_step: the step; everything it launches is captured.
        allocate: makes the static tensors of a key.
        batch_of: the batch that tensors hold, without mirrors; its maxima bound those of replays.
        builder: of the backend; one that plans on the host is asked before capture and replay.
        inputs: by name, everything besides the step's own tensors that a graph reads by address.
        weights: the model, or what else holds its parameters and buffers.
        recorder: makes whole graphs.
        pieces: makes graphs that are broken around attention.
        keep_failures: remember what cannot be captured instead of raising; it runs uncaptured.
    """

    def __init__(
        self,
        run_step: RunStep,
        allocate: Callable[[BatchDescriptor], StepTensors],
        batch_of: Callable[[StepTensors, BatchDescriptor], CommonAttentionMetadata],
        builder: AttentionMetadataBuilder[AttentionMetadata],
        inputs: Callable[[], dict[str, Any]],
        weights: Any,
        recorder: GraphRecorder,
        pieces: Any = None,
        keep_failures: bool = False,
    ) -> None:
        self.run_step = run_step
        self.allocate = allocate
        self.batch_of = batch_of
        self.builder = builder
        self.inputs = inputs
        self.weights = weights
        self.recorder = recorder
        self.pieces = pieces
        self.keep_failures = keep_failures
        self.failures: dict[BatchDescriptor, CaptureError] = {}
        self._captured: dict[BatchDescriptor, CapturedStep] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: object) -> bool:
        """Whether the key is captured, or has failed."""
        return key in self._captured or key in self.failures

    def __iter__(self):
        return iter(self._captured.values())

    @property
    def num_bytes(self) -> int:
        """Of all graphs."""
        return sum(captured.num_bytes for captured in self)

    @property
    def seconds(self) -> float:
        """That all captures took."""
        return sum(captured.seconds for captured in self)

    def get(
        self, key: BatchDescriptor, mode: CUDAGraphMode = CUDAGraphMode.FULL
    ) -> CapturedStep | None:
        """The graph of `key`, captured now if it is not there yet; None if that failed before.

        Raises:
            CaptureError: the step cannot be captured, and failures are not kept. Nothing of it
                stays behind.
        """
        if key in self._captured:
            return self._captured[key]
        if key in self.failures:
            return None
        try:
            captured = self._capture(key, mode)
        except CaptureError as error:
            if not self.keep_failures:
                raise
            logger.warning("steps of %s run uncaptured: %s", key, error)
            self.failures[key] = error
            return None
        self._captured[key] = captured
        return captured

    def replay(
        self,
        captured: CapturedStep,
        metadata: AttentionMetadata | None = None,
        *,
        weights: bool = True,
    ) -> None:
        """Run a graph on what its tensors hold; returns before the device is done.

        Args:
            metadata: of this step, where the graph is broken around attention.
            weights: look for moved weights too; once for replays that follow one another.

        A backend that plans on the host reads the tensors' host side, which must hold the step.

        Raises:
            ValueError: a tensor that the graph reads has moved since the capture; nothing was run.
        """
        self.check_addresses(captured, weights=weights)
        if captured.metadata is not None and captured.mode is CUDAGraphMode.FULL:
            tensors = captured.tensors
            longest = self.batch_of(tensors, captured.key).max_seq_len
            common = tensors.common(tensors.max_query_len, longest)
            self.builder.prepare_replay(captured.metadata, common)
        captured.num_replays += 1
        if captured.mode is CUDAGraphMode.FULL:
            captured.graph.replay()
        else:
            captured.graph.replay(metadata)  # type: ignore

    def check_addresses(self, captured: CapturedStep, *, weights: bool = True) -> None:
        """Raise a ValueError that names what has moved since the capture.

        For 32 layers 9 us, and about 20 more with the weights and modules, once for replays that
        follow one another: at every replay where `decode_steps` is 1 (H200 host, 2026-11-21).
        """
        moved = captured.book.moved()
        if weights:
            moved += captured.weights.moved()
        if moved:
            shown = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if moved[5:] else "")
            raise ValueError(
                f"tensors of a captured step must stay where they were, got {shown} at another "
                "address or of another shape; make a new DecodeSession, or call release() and "
                "capture again"
            )

    def release(self) -> None:
        """Drop every graph; the pool's memory goes back to the allocator."""
        self._captured.clear()
        self.failures.clear()
        self.recorder.release()

    def _capture(self, key: BatchDescriptor, mode: CUDAGraphMode) -> CapturedStep:
        """Run the step once for lazy initialisation, then record it.

        Its rows are padding: only the null block is written.
        """
        begin = time.perf_counter()
        tensors = self.allocate(key)
        tensors.upload()
        common = self.batch_of(tensors, key)
        whole = mode is CUDAGraphMode.FULL
        planned = tensors.common(tensors.max_query_len, common.max_seq_len)
        metadata = first = None  # planned in the graph
        if whole:
            metadata = self.builder.prepare_capture(planned)
        else:
            first = self.builder.build(0, planned)
            metadata = first if self.pieces.breaks_all(key) else None

        def warm_up() -> None:
            self.run_step(tensors, key, common, first or metadata)

        def run() -> None:
            self.run_step(tensors, key, common, metadata)

        def record() -> tuple[Graph, int]:
            return self.recorder.record(run) if whole else self.pieces.record(run, key)

        with diagnosing(key, lambda: (warm_up(), record())):
            (self.recorder if whole else self.pieces).warm_up(warm_up)
            tensors.upload()  # the step has changed its state
            graph, num_bytes = record()
        tensors.upload()
        book = AddressBook.of(
            step=tensors.device, metadata=metadata if whole else None, **self.inputs()
        )
        seconds = time.perf_counter() - begin
        logger.debug("captured %s as %s in %.3f s, %d bytes", key, mode.name, seconds, num_bytes)
        weights = AddressBook.of(weights=self.weights)
        return CapturedStep(key, mode, graph, tensors, book, weights, metadata, num_bytes, seconds)
