"""A recorder for debugging: a replay runs the step's Python again (`debug="eager_replay"`).

Everything around the graph is as in a capture: padding, static tensors, checks.
"""

import torch

from attn_ops import AttentionMetadata
from attn_ops.ops.breaks import AttentionCall, around_attention
from graphs.capture.recorder import Builder, HostPlan, Step, plan_anew, plan_in_place


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
