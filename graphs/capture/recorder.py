"""Records a step and replays it.

    Step -> Recorder.metadata, warm_up, record -> Graph -> plan, replay; plan, replay; ...

`Recorder` and `Graph` are the contract; `graphs.capture.piecewise` implements it too.
`WholeRecorder` captures one CUDA graph. `Rerun` is for debugging (`debug="eager_replay"`): a replay
runs the step's Python again, with the same padding, static tensors and checks. S requests, R rows
of logits, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import torch

from attn_ops import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attn_ops.kv_cache import PagedKVCache
from attn_ops.ops.breaks import AttentionCall, around_attention
from graphs.capture.pool import GraphPool, paused_collector
from graphs.modes import BatchDescriptor
from graphs.sampling import PenaltyState
from graphs.step.tensors import StepTensors

Builder = AttentionMetadataBuilder[AttentionMetadata]

HostPlan = Callable[[], AttentionMetadata | None]
"""What the host does before a replay, whose step its tensors hold on the host and the device.

Returns the metadata that the replay takes; None: it takes none.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A padded step that can be recorded: model, sampling and what follows."""

    key: BatchDescriptor
    tensors: StepTensors  # what it reads, and where it leaves its results
    common: CommonAttentionMetadata  # without host mirrors; its maxima bound those of every replay
    cache: PagedKVCache
    penalties: PenaltyState | None  # None: it has no request with penalties
    run: Callable[[AttentionMetadata | None], torch.Tensor]
    """Runs the step, returns its logits [R, V]. None: it builds its metadata itself.

    Where edits come late it ends with the logits, and `rest` follows.
    """
    draw: Callable[[torch.Tensor], torch.Tensor]
    """Tokens [R] int64 for logits [R, V]."""
    rest: Callable[[AttentionMetadata | None], torch.Tensor] | None = None
    """What follows the logits that `run` leaves, where edits come late."""

    def common_on_host(self) -> CommonAttentionMetadata:
        """The batch that the tensors hold, with host mirrors; `max_seq_len` is the bound."""
        return self.tensors.common(self.tensors.max_query_len, self.common.max_seq_len)


class Graph(Protocol):
    """A recorded step."""

    @property
    def num_bytes(self) -> int:
        """Device memory by which recording it has grown the pool."""
        ...

    @property
    def metadata(self) -> AttentionMetadata | None:
        """What the graph reads by address; None: it was made inside, or comes with each replay."""
        ...

    @property
    def plan(self) -> HostPlan | None:
        """Must run before every replay; None: the host has nothing to do."""
        ...

    def replay(self, metadata: AttentionMetadata | None = None) -> None:
        """Run the step on what its tensors hold, on the current stream.

        Args:
            metadata: what `plan` has returned.
        """


class Recorder(Protocol):
    """A way of making graphs."""

    def metadata(self, step: Step) -> AttentionMetadata | None:
        """What the host plans before the step is recorded; None: the step plans on the device."""
        ...

    def warm_up(self, step: Step, metadata: AttentionMetadata | None) -> None:
        """Run the step once, unrecorded, for lazy initialisation."""

    def record(self, step: Step, metadata: AttentionMetadata | None) -> Graph:
        """Record the step; if that raises, nothing of it is kept."""
        ...

    def release(self) -> None:
        """Give back the memory of all graphs; none of them is alive."""


def metadata_now(
    builder: Builder, tensors: StepTensors, *, apart: bool = True
) -> AttentionMetadata:
    """Metadata for the batch that the host side of `tensors` holds, planned for its lengths.

    `apart`: prefixes that its requests share are read apart.
    """
    longest = int(tensors.arrays["seq_lens"].max(initial=1))
    common = tensors.common(tensors.max_query_len, longest)
    if apart and (number := tensors.num_groups):
        return builder.build_cascade(common, *tensors.groups(number))
    return builder.build(0, common)


def plan_in_place(
    builder: Builder, step: Step, metadata: AttentionMetadata | None
) -> HostPlan | None:
    """For a graph with attention inside: every replay updates `metadata` in place."""
    if metadata is None:
        return None

    def update() -> None:
        builder.prepare_replay(metadata, step.common_on_host())

    return update


def plan_anew(builder: Builder, step: Step) -> HostPlan:
    """For a graph with attention outside: every replay takes new metadata."""
    return functools.partial(metadata_now, builder, step.tensors)


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


class Rerun:
    """A step that runs again.

    Args:
        step: what runs.
        recorded: the metadata that it runs with, as recorded; None: it builds its own.
        metadata, plan: see `Graph`.
    """

    num_bytes = 0

    def __init__(
        self,
        step: Step,
        recorded: AttentionMetadata | None,
        metadata: AttentionMetadata | None,
        plan: HostPlan | None,
    ) -> None:
        self.step, self.recorded = step, recorded
        self.metadata, self.plan = metadata, plan

    def replay(self, metadata: AttentionMetadata | None = None) -> None:
        """`metadata` replaces the recorded one in every call of attention."""
        if metadata is None:
            self.step.run(self.recorded)
            return

        def replaced(call: AttentionCall) -> tuple[torch.Tensor, ...]:
            return call.run(metadata)

        with around_attention(replaced):
            self.step.run(self.recorded)


class RerunRecorder:
    """Records nothing: its graphs run the step.

    Args:
        builder: of the backend.
        in_pieces: act as a graph in pieces: attention takes each replay's metadata.
    """

    def __init__(self, builder: Builder, *, in_pieces: bool) -> None:
        self.builder, self.in_pieces = builder, in_pieces

    def metadata(self, step: Step) -> AttentionMetadata | None:
        common = step.common_on_host()
        if self.in_pieces:
            return self.builder.build(0, common)
        return self.builder.prepare_capture(common)

    def warm_up(self, step: Step, metadata: AttentionMetadata | None) -> None:
        step.run(metadata)

    def record(self, step: Step, metadata: AttentionMetadata | None) -> Rerun:
        if self.in_pieces:
            return Rerun(step, metadata, None, plan_anew(self.builder, step))
        return Rerun(step, metadata, metadata, plan_in_place(self.builder, step, metadata))

    def release(self) -> None:
        """There is nothing to give back."""
