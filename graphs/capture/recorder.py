"""The contract between a step, a recorder that records it, and the graph that replays it.

    Step -> Recorder.metadata, warm_up, record -> Graph -> plan, replay; plan, replay; ...

`whole`, `pieces` and `rerun` implement it. S requests, R rows of logits, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from attn_ops import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
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
    caches: Sequence[torch.Tensor]  # the KV cache of every layer
    tables: Sequence[str]  # the block table of each, by its name in `tensors`
    penalties: PenaltyState | None  # None: it has no request with penalties
    run: Callable[[AttentionMetadata | None], torch.Tensor]
    """Runs the step, returns its logits [R, V]. None: it builds its metadata itself."""
    call: Callable[[AttentionMetadata | None], torch.Tensor]
    """The same as steps are called that are not recorded; see `fx_passes.forms`."""
    draw: Callable[[torch.Tensor], torch.Tensor]
    """Tokens [R] int64 for logits [R, V]."""

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
