"""Steps captured in segments, each a CUDA graph, with attention called between them.

    model:    embedding, q, k, v | attention | o, mlp, q, k, v | attention | ... | norm, logits
    recorded: segment 0          | call 0    | segment 1       | call 1    | ... | segment n

A call of attention that cannot be captured ends the capture, and the next one begins after it.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from attn_ops import AttentionMetadata
from attn_ops.ops.breaks import AttentionCall, around_attention
from graphs.capture.pool import GraphPool, paused_collector
from graphs.capture.recorder import Builder, HostPlan, Step, plan_anew
from graphs.modes import BatchDescriptor


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


Breaks = Callable[[AttentionCall], bool]
"""Whether a call must run between the graphs."""


@dataclasses.dataclass(frozen=True, eq=False)
class BrokenCall:
    """A call outside of the graphs: its operands' addresses, and where its results go.

    q and `results` do not own their memory. References would keep a tensor of every layer alive.
    """

    call: AttentionCall
    results: tuple[torch.Tensor, ...]  # out [T, N, H] and, if asked for, lse [T, N]

    @classmethod
    def of(cls, call: AttentionCall, results: Sequence[torch.Tensor]) -> "BrokenCall":
        """`call`, with q by its address; the cache and parameters are owned, and stay."""
        weak = dataclasses.replace(call, q=over_memory_of(call.q))
        return cls(weak, tuple(over_memory_of(r) for r in results))

    def run(self, metadata: AttentionMetadata) -> None:
        """Attend over the batch of `metadata`; the rows of q and the result are those recorded."""
        # Costs a copy kernel a call, besides a launch a segment.
        self.call.run_into(self.results, metadata)


class PiecewiseGraph:
    """A recorded step: segments and the calls between them, in order.

    Calls that were not broken out read the metadata of the recording, whose tensors must hold the
    replay's batch, as in any graph.

    Args:
        parts: as `record_parts` gives them.
        num_bytes, plan: see `Graph`.
    """

    metadata = None

    def __init__(
        self,
        parts: Sequence[Segment | BrokenCall],
        num_bytes: int = 0,
        plan: HostPlan | None = None,
    ) -> None:
        self.num_bytes, self.plan = num_bytes, plan
        segments = [part for part in parts if not isinstance(part, BrokenCall)]
        self._anchors = segments  # the empty ones too: their memory is the pool's while they live
        self.parts = [p for p in parts if isinstance(p, BrokenCall) or not p.is_empty]
        self.num_breaks = len(parts) - len(segments)
        self.num_segments = len(self.parts) - self.num_breaks

    def replay(self, metadata: AttentionMetadata | None = None) -> None:
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
        for part in self.parts:
            if isinstance(part, BrokenCall):
                part.run(metadata)
            else:
                part.replay()


class PiecewiseRecorder:
    """Records steps in pieces.

    Args:
        builder: of the backend; builds the metadata of every replay.
        segments: makes the pieces.
        breaks: by key, which calls of attention run between the graphs; None: all.
    """

    def __init__(
        self,
        builder: Builder,
        segments: SegmentRecorder,
        breaks: Callable[[BatchDescriptor], Breaks | None],
    ) -> None:
        self.builder, self.segments, self.breaks = builder, segments, breaks

    def metadata(self, step: Step) -> AttentionMetadata:
        """As for every replay: calls between graphs may refuse the metadata of a capture."""
        return self.builder.build(0, step.common_on_host())

    def warm_up(self, step: Step, metadata: AttentionMetadata | None) -> None:
        """In one piece."""
        self.segments.warm_up(lambda: step.run(metadata))

    def record(self, step: Step, metadata: AttentionMetadata | None) -> PiecewiseGraph:
        """Record the step; where some attention is captured, the metadata is built for it inside.

        Whatever the step raises leaves no capture open.
        """
        breaks = self.breaks(step.key)
        captured = metadata if breaks is None else None
        before = self.segments.num_bytes()
        parts = record_parts(
            lambda: step.run(captured), self.segments, breaks or (lambda call: True)
        )
        num_bytes = self.segments.num_bytes() - before
        return PiecewiseGraph(parts, num_bytes, plan_anew(self.builder, step))

    def release(self) -> None:
        self.segments.release()


def record_parts(
    run: Callable[[], object], segments: SegmentRecorder, breaks: Breaks
) -> list[Segment | BrokenCall]:
    """Segments of a step and the calls between them, in order.

    Calls that break are remembered, not run: what they read is not there yet. The cut is made
    where the operator's Python runs, in a compiled model or not.

    Args:
        run: the step, its arguments bound; results stay in the step's tensors.
        segments: record what is between calls.
        breaks: which calls run between the graphs.
    """
    # Inductor could cut instead (`graph_partition`), with a CUDA graph per partition of a compiled
    # artifact. Ours is one artifact that all layers call (`fx_passes.regions`), and each layer
    # needs a graph.
    cutting = _Cutting(segments, breaks)
    with paused_collector(), segments.recording(), cutting.open():
        run()
    return cutting.parts


class _Cutting:
    """The recording of one step, cut at calls of attention."""

    def __init__(self, segments: SegmentRecorder, breaks: Breaks) -> None:
        self.segments, self.breaks = segments, breaks
        self.parts: list[Segment | BrokenCall] = []
        self._segment = contextlib.ExitStack()  # the one that is recorded

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """The first segment begins here, the last ends here; calls between are asked about."""
        try:
            with self._segment:
                self._begin()
                with around_attention(self._cut):
                    yield
        except BaseException:
            self.parts.clear()
            raise

    def _cut(self, call: AttentionCall) -> tuple[torch.Tensor, ...] | None:
        """Cut here, if the call breaks: its results are static memory, without values yet."""
        if not self.breaks(call):
            return None
        # Memory of the pool, as the segment has not ended: later segments use it again once the
        # model has let it go.
        results = call.empty_results()
        self._segment.close()
        self.parts.append(BrokenCall.of(call, results))
        self._begin()
        return results

    def _begin(self) -> None:
        self.parts.append(self._segment.enter_context(self.segments.segment()))


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
