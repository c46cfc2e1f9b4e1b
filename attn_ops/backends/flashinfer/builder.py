"""Metadata of a step for FLASHINFER: a `Plan` a geometry, made on the host.

T tokens, L rows of requests that have tokens in the cache, S requests.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from attn_ops.backends.flashinfer.captured import CapturedDecodes
from attn_ops.backends.flashinfer.parts import divide, page_indices
from attn_ops.backends.flashinfer.wrappers import (
    WORKSPACE_BYTES,
    Kind,
    Wrapper,
    Wrappers,
    plan_arguments,
)
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
    Views,
    make_local_attention_virtual_batches,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What the layers of one geometry share over a step."""

    num_rows: int  # rows of requests with tokens, L; of a captured batch S
    rows: torch.Tensor | None  # [L] int64, device: those rows; None: they are the first ones
    wrappers: tuple[tuple[slice, Wrapper], ...]  # which of the L rows each wrapper computes
    captured: CapturedDecodes | None = None  # None: the step is not captured


class FlashInferMetadataBuilder(AttentionMetadataBuilder):
    """Plans the wrappers: a `Plan` per geometry. Needs query_start_loc_cpu and seq_lens_cpu.

    A step of single-token queries may be captured: `prepare_capture` before the capture begins,
    then the metadata in the graph, and `prepare_replay` before every replay, behind the upload of
    the step's tensors on the stream that the graph runs on.

    Args:
        workspace_bytes: at least so many bytes for partial results, allocated with the first plan;
            the other arguments are `AttentionMetadataBuilder`'s.
    """

    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1
    plans_on_host = plans_in_turn = True

    def __init__(
        self, *arguments: Any, workspace_bytes: int = WORKSPACE_BYTES, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._wrappers = Wrappers(self.specs, workspace_bytes)

    def plan(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> Plan:
        division = divide(common, self.block_size)
        indices = page_indices(common, division.num_pages, self.block_size)
        rows = division.row_indices
        if rows is not None:
            rows = torch.from_numpy(rows).to(common.device, non_blocking=True)
        parts = {Kind.DECODE: division.decodes, Kind.of_prefills(spec): division.prefills}
        taken: dict[Kind, Wrapper] = {}
        computed = []
        for kind, part in parts.items():
            if part is None:
                continue
            pages = indices[part.pages]
            arguments = plan_arguments(kind, spec, part, pages, self.block_size, common.causal)
            with torch.cuda.device_of(indices):
                wrapper = taken[kind] = self._wrappers.take(kind, common.device)
                wrapper.plan(**arguments)
            computed.append((part.rows, wrapper))
        plan = Plan(division.num_rows, rows, tuple(computed))
        self._wrappers.lend(taken, plan)
        return plan

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionMetadata:
        """As `prepare_capture`.

        Raises:
            ValueError: the capture has begun; a graph records no plan.
        """
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "prepare_capture must be called before the capture begins, got a stream that is "
                "captured; FLASHINFER plans on the host"
            )
        return self.prepare_capture(common_attn_metadata)

    def prepare_capture(self, common_attn_metadata: CommonAttentionMetadata) -> AttentionMetadata:
        """Metadata for a captured decode step, planned for the batch as it is now.

        It owns the arrays that the graph reads: keep it for as long as the graph.

        Raises:
            ValueError: the batch is no decode batch, or its mirrors are not there.
        """
        prepared: dict[int | None, AttentionMetadata] = {}
        for chunk, specs, batch in self._batches(common_attn_metadata):
            captured = CapturedDecodes(specs, batch, self._wrappers, self.block_size)
            captured.plan(batch)
            rows = slice(captured.num_reqs)
            plans = {
                spec: Plan(captured.num_reqs, None, ((rows, wrapper),), captured)
                for spec, wrapper in captured.wrappers.items()
            }
            prepared[chunk] = AttentionMetadata(batch, self.backend, plans, self.block_size)
        plain = AttentionMetadata(common_attn_metadata, self.backend, None, self.block_size)
        metadata = prepared.pop(None, plain)
        chunked = {chunk: m for chunk, m in prepared.items() if chunk is not None}
        return metadata.replace(views=Views(chunked=chunked))

    def prepare_replay(
        self, metadata: AttentionMetadata, common_attn_metadata: CommonAttentionMetadata
    ) -> None:
        """Plan the captured step for what the batch holds now.

        Waits while the device has yet to begin the replay before this one: a plan's pinned memory
        is not overwritten before it is copied.

        Raises:
            ValueError: the metadata is not that of a captured step, or the batch does not fit it.
        """
        for chunk, specs, batch in self._batches(common_attn_metadata):
            holder = metadata if chunk is None else metadata.views.chunked.get(chunk)
            plan = None if holder is None else holder.plans.get(specs[0])
            if plan is None or plan.captured is None:
                raise ValueError(f"metadata must come from prepare_capture, got {metadata}")
            plan.captured.plan(batch)

    def _batches(
        self, common: CommonAttentionMetadata
    ) -> Iterator[tuple[int | None, list[AttentionSpec], CommonAttentionMetadata]]:
        """The step as the layers of each chunk size see it; None: as it is.

        A decode has one chunk, so its virtual batches are as many as its requests.
        """
        for chunk in dict.fromkeys(s.attention_chunk_size for s in self.specs):
            specs = [
                dataclasses.replace(s, attention_chunk_size=None)
                for s in self.specs
                if s.attention_chunk_size == chunk
            ]
            if chunk is None:
                yield chunk, specs, common
            else:
                virtual = make_local_attention_virtual_batches(chunk, common, self.block_size)
                yield chunk, specs, virtual
