"""Captured steps by their keys: captured once, checked and replayed."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from graphs.capture.addresses import AddressBook
from graphs.capture.failures import CaptureError, diagnosing
from graphs.capture.recorder import Graph, Recorder, Step
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.step.tensors import StepTensors

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class CapturedStep:
    """A step's graph, or its two, with the tensors they read and write, and their addresses."""

    step: Step
    mode: CUDAGraphMode  # FULL or PIECEWISE
    graph: Graph
    rest: Graph | None  # what follows the logits, where edits come late
    book: AddressBook  # of inputs
    weights: AddressBook
    seconds: float
    num_replays: int = 0
    key: BatchDescriptor = dataclasses.field(init=False)  # of the step
    tensors: StepTensors = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.key, self.tensors = self.step.key, self.step.tensors

    @property
    def needs_host(self) -> bool:
        """The host plans every replay: none may follow another without it."""
        return self.graph.plan is not None

    @property
    def plans_in_place(self) -> bool:
        """The plan is part of the graph: the host may change it only after the last replay."""
        return self.needs_host and self.mode is CUDAGraphMode.FULL


class StepGraphs:
    """Graphs of steps by `BatchDescriptor`.

    Args:
        make_step: makes the step of a key, on new static tensors that hold padding.
        recorders: make the graphs, by mode.
        model: its parameters and buffers must stay where they are.
        keep_failures: remember what cannot be captured instead of raising; it runs uncaptured.
    """

    def __init__(
        self,
        make_step: Callable[[BatchDescriptor], Step],
        recorders: Mapping[CUDAGraphMode, Recorder],
        model: torch.nn.Module,
        keep_failures: bool = False,
    ) -> None:
        self.make_step = make_step
        self.recorders = recorders
        self.model = model
        self.keep_failures = keep_failures
        self.failures: dict[BatchDescriptor, CaptureError] = {}
        self._captured: dict[BatchDescriptor, CapturedStep] = {}
        self._rehearsed = 0.0  # seconds

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: object) -> bool:
        """Whether the key is captured, or has failed."""
        return key in self._captured or key in self.failures

    def __iter__(self) -> Iterator[CapturedStep]:
        return iter(self._captured.values())

    @property
    def num_bytes(self) -> int:
        """Of all graphs."""
        graphs = [graph for captured in self for graph in (captured.graph, captured.rest)]
        return sum(graph.num_bytes for graph in graphs if graph is not None)

    @property
    def seconds(self) -> float:
        """That all captures took, and compiling their kernels before."""
        return self._rehearsed + sum(captured.seconds for captured in self)

    def get(
        self, key: BatchDescriptor, mode: CUDAGraphMode = CUDAGraphMode.FULL
    ) -> CapturedStep | None:
        """The graph of `key`, captured now if it is not there yet; None if that failed before.

        Raises:
            CaptureError: the step cannot be captured, and failures are not kept. Nothing of it
                is kept either.
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

    def rehearse(self, keys: Iterable[tuple[CUDAGraphMode, BatchDescriptor]]) -> None:
        """Compile Triton kernels side by side before steps are captured; others run, on padding."""
        from attn_ops.early_launch.triton.launch import rehearsal

        begin = time.perf_counter()
        with rehearsal():
            for mode, key in keys:
                step, recorder = self.make_step(key), self.recorders[mode]
                step.tensors.upload()
                with contextlib.suppress(Exception):  # the capture says what is wrong
                    recorder.warm_up(step, recorder.metadata(step))
        self._rehearsed += time.perf_counter() - begin

    def replay(self, captured: CapturedStep, *, weights: bool = True) -> None:
        """Run a graph on what its tensors hold; returns before the device is done.

        Args:
            weights: look for moved weights too; once for replays that follow one another.

        Where the host plans every replay, it reads the tensors' host side, which must hold the
        step.

        Raises:
            ValueError: a tensor that the graph reads has moved since the capture; nothing was run.
        """
        self.check_addresses(captured, weights=weights)
        graph = captured.graph
        metadata = None if graph.plan is None else graph.plan()
        captured.num_replays += 1
        graph.replay(metadata)

    def finish(self, captured: CapturedStep) -> None:
        """Run what follows a replay whose edits come late; its tensors hold them now.

        It reads the step's own tensors alone, whose addresses the replay has just compared.
        """
        assert captured.rest is not None, "its edits come late"
        captured.rest.replay()

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
                "address or of another shape; write weights by weight.copy_(new) (torch does not "
                "count weight.data.copy_), make a new DecodeSession, or call release() and "
                "capture again"
            )

    def release(self) -> None:
        """Drop every graph; the pool's memory goes back to the allocator."""
        self._captured.clear()
        self.failures.clear()
        for recorder in self.recorders.values():
            recorder.release()

    def _capture(self, key: BatchDescriptor, mode: CUDAGraphMode) -> CapturedStep:
        """Run the step once for lazy initialisation, then record it.

        Its rows are padding: only the null block is written.
        """
        begin = time.perf_counter()
        step, recorder = self.make_step(key), self.recorders[mode]
        step.tensors.upload()
        metadata = recorder.metadata(step)

        parts = [(step, metadata)]
        if step.rest is not None:
            parts.append((dataclasses.replace(step, run=step.rest), None))

        def record() -> list[Graph]:
            for part in parts:
                recorder.warm_up(*part)
            step.tensors.upload()  # the step has changed its state
            return [recorder.record(*part) for part in parts]

        with diagnosing(key, record):
            graph, *more = record()
        step.tensors.upload()
        book, weights = _inputs_of(step, graph), AddressBook.of(weights=self.model)
        seconds = time.perf_counter() - begin
        logger.debug("captured %s as %s in %.3f s", key, mode.name, seconds)
        return CapturedStep(step, mode, graph, more[0] if more else None, book, weights, seconds)


def _inputs_of(step: Step, graph: Graph) -> AddressBook:
    """All that the graph reads by address, but for the weights."""
    states = step.cache.states
    return AddressBook.of(
        step=step.tensors.device,
        metadata=graph.metadata,
        kv_caches=step.cache.tensors,
        states=None if states is None else states.tensors,
        penalties=step.penalties,
    )
