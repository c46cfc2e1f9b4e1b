"""Steps as graphs with calls between them: a capture that is broken around attention, as it runs.

    model:    embedding, q, k, v | attention | o, mlp, q, k, v | attention | ... | norm, logits
    recorded: segment 0          | call 0    | segment 1       | call 1    | ... | segment n

A call that cannot be captured ends the capture from inside the operator's Python, and a new one
begins behind it: in whatever calls the operator, compiled or not. Everything else of a padded
step is the same in every step and is captured. A call is remembered with its operands' addresses
and made anew in every replay, with the metadata of that replay.

Inductor's own partitions (`graph_partition`, a wrapper around each) would hold a CUDA graph per
partition of one compiled artifact. Ours is one artifact for all layers: the model is cut into
layers, and one compiled piece is called once a layer (`fx_passes.regions`), so that one of its
partitions needs a graph for each layer. Cutting what runs, instead of what is compiled, gives each
layer its own graph, and needs no compiler.

Memory: a call's result is written to memory of the pool, allocated in the segment before it, so
that later segments take it over once the model has let it go. q and the results are remembered as
addresses: a reference to them would keep a tensor of every layer alive at once.

Cost: besides a launch per segment, a copy kernel per call brings the backend's result to its
static place.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch

from attn_ops import AttentionMetadata
from attn_ops.ops.breaks import AttentionCall, around_attention
from graphs.capture.pool import GraphPool, end_failed_capture, is_invalidated, paused_collector

Breaks = Callable[[AttentionCall], bool]
"""Whether a call must stand outside of the graphs."""


class Segment(Protocol):
    """What was recorded between two calls; it also keeps the pool's memory from being returned."""

    @property
    def is_empty(self) -> bool:
        """Nothing was launched in it."""
        ...

    def replay(self) -> None:
        """Launch it."""


class SegmentRecorder(Protocol):
    """Makes segments: of CUDA, and in tests of anything that can be run again."""

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Run once, unrecorded, for lazy initialisation."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Stands around all segments of a step."""
        ...

    def begin(self) -> None:
        """Record from here on."""

    def end(self) -> Segment:
        """Up to here; closed also when this raises."""
        ...

    def num_bytes(self) -> int:
        """Memory that is taken now."""
        ...


class CUDASegments:
    """CUDA graphs in one memory pool, captured on its stream.

    Args:
        pool: shared with other graphs that are not replayed at the same time.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self._open: torch.cuda.CUDAGraph | None = None

    def warm_up(self, run: Callable[[], Any]) -> None:
        """On the stream that is captured next, which has libraries' workspaces of its own."""
        with self._on_stream():
            run()
        torch.cuda.synchronize()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        _ = self.pool.handle  # the pool captures something itself when it is new
        torch.cuda.synchronize()
        with self._on_stream():
            yield

    def begin(self) -> None:
        graph, pool = torch.cuda.CUDAGraph(), cast(Any, self.pool.handle)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        self._open = graph

    def end(self) -> "CUDASegment":
        graph, self._open = self._open, None
        assert graph is not None, "no segment was begun"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._end(graph)
        empty = [w for w in caught if "Graph is empty" in str(w.message)]  # as torch tells it
        for w in caught:
            if w not in empty:
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        return CUDASegment(graph, bool(empty))

    def num_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture; one that a forbidden call has invalidated, too."""
        try:
            if is_invalidated():
                raise RuntimeError("capture must stay valid to its end, got an invalidated one")
            graph.capture_end()
        except BaseException:
            end_failed_capture(graph, self.pool.stream)
            raise

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        self.pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.pool.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.pool.stream)


@dataclasses.dataclass(frozen=True, eq=False)
class CUDASegment:
    """One CUDA graph."""

    graph: torch.cuda.CUDAGraph
    is_empty: bool

    def replay(self) -> None:
        self.graph.replay()


@dataclasses.dataclass(frozen=True, eq=False)
class BrokenCall:
    """A call outside of the graphs; q and `results` do not own their memory."""

    call: AttentionCall
    results: tuple[torch.Tensor, ...]  # out [T, N, H] and, if asked for, lse [T, N]

    @classmethod
    def of(cls, call: AttentionCall, results: Sequence[torch.Tensor]) -> "BrokenCall":
        """`call`, with q by its address; the cache and parameters are owned, and stay."""
        weak = dataclasses.replace(call, q=over_memory_of(call.q))
        return cls(weak, tuple(over_memory_of(r) for r in results))

    def run(self, metadata: AttentionMetadata) -> None:
        """Attend over the batch of `metadata`; the rows of q and the result are those recorded."""
        self.call.run_into(self.results, metadata)


class PiecewiseGraph:
    """A recorded step: segments and the calls between them, in order.

    Calls that were not broken out read the metadata of the recording, whose tensors must hold the
    replay's batch, as in any graph.
    """

    def __init__(self, steps: Sequence[Segment | BrokenCall]) -> None:
        segments = [s for s in steps if not isinstance(s, BrokenCall)]
        self._anchors = segments  # the empty ones too: their memory is the pool's while they live
        self.steps = [s for s in steps if isinstance(s, BrokenCall) or not s.is_empty]
        self.num_breaks = len(steps) - len(segments)
        self.num_segments = len(self.steps) - self.num_breaks

    def replay(self, metadata: AttentionMetadata) -> None:
        """Run the step on what its static tensors hold, on the current stream.

        Args:
            metadata: of this step's batch: at most as many tokens as were recorded, any lengths.

        Raises:
            ValueError: it is not metadata, or names another backend's geometry; see `attention`.
        """
        if not isinstance(metadata, AttentionMetadata):
            raise ValueError(
                f"metadata must be an AttentionMetadata, got {type(metadata).__name__}"
            )
        for step in self.steps:
            if isinstance(step, BrokenCall):
                step.run(metadata)
            else:
                step.replay()


class PiecewiseRecorder:
    """Records steps in pieces.

    Args:
        segments: makes the pieces.
    """

    def __init__(self, segments: SegmentRecorder) -> None:
        self.segments = segments

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Run once, unrecorded and in one piece, for lazy initialisation."""
        self.segments.warm_up(run)

    def record(self, run: Callable[[], Any], breaks: Breaks) -> tuple[PiecewiseGraph, int]:
        """Record a step; calls that break are remembered, not run: what they read is not there yet.

        Args:
            run: the step, its arguments bound; results stay in the step's tensors.
            breaks: which calls stand outside.

        Returns:
            The graph and the bytes it took. Whatever `run` raises leaves no capture open.
        """
        before = self.segments.num_bytes()
        cutting = _Cutting(self.segments, breaks)
        with paused_collector(), self.segments.recording(), cutting.open():
            run()
        return PiecewiseGraph(cutting.steps), self.segments.num_bytes() - before


class _Cutting:
    """The recording of one step."""

    def __init__(self, segments: SegmentRecorder, breaks: Breaks) -> None:
        self.segments, self.breaks = segments, breaks
        self.steps: list[Segment | BrokenCall] = []
        self._is_open = False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """The first segment begins here, the last ends here; calls between are asked about."""
        try:
            self._begin()
            with around_attention(self.cut):
                yield
            self._end()
        except BaseException:
            if self._is_open:
                # A failed capture says so again when it is ended; the first error counts.
                with contextlib.suppress(Exception):
                    self._end()
            self.steps.clear()
            raise

    def cut(self, call: AttentionCall) -> tuple[torch.Tensor, ...] | None:
        """Cut here, if the call breaks: its results are static memory, without values yet."""
        if not self.breaks(call):
            return None
        results = call.empty_results()  # inside the segment that ends: memory of the pool
        self._end()
        self.steps.append(BrokenCall.of(call, results))
        self._begin()
        return results

    def _begin(self) -> None:
        self.segments.begin()
        self._is_open = True

    def _end(self) -> None:
        self._is_open = False
        self.steps.append(self.segments.end())


def over_memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same elements that does not own them: valid while their memory is mapped.

    For memory of a graph pool, which stays mapped as long as a graph of the pool is alive.
    """
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    num_bytes = reach * tensor.element_size() if tensor.numel() else 0
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, num_bytes
    )
    weak = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return weak.set_(storage, 0, tensor.shape, tensor.stride())  # pyright: ignore
