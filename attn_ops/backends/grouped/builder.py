"""A step's metadata for several backends, each made by that backend's own builder."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attn_ops.backends.base import Backend
from attn_ops.backends.grouped.backend import GroupedBackend
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionOptions,
    AttentionSpec,
    CommonAttentionMetadata,
    LogitsRows,
    Views,
)

logger = logging.getLogger(__name__)


class GroupedMetadataBuilder(AttentionMetadataBuilder):
    """A builder of each backend that has layers.

    Raises:
        ValueError: a backend does not take its layers, or two want batches in different orders.
    """

    def __init__(
        self,
        backend: GroupedBackend,
        specs: Sequence[AttentionSpec],
        block_size: int,
        device: torch.device | str,
        **keywords: Any,
    ) -> None:
        super().__init__(backend, specs, block_size, device, **keywords)
        self._backend = backend
        self._groups = backend.groups_of(self.specs)
        self._parts = {part.name: part for part in backend.parts}
        self._builders = {
            part.name: part.builder(part, self._groups[part.name], block_size, device, **keywords)
            for part in backend.parts
            if part.name in self._groups
        }
        thresholds = {name: b.reorder_batch_threshold for name, b in self._builders.items()}
        wanted = set(thresholds.values()) - {None}
        if len(wanted) > 1:
            raise ValueError(
                f"groups of backend {backend.name} must want one order of a batch, "
                f"got reorder_batch_threshold {thresholds}"
            )
        self.reorder_batch_threshold = wanted.pop() if wanted else None
        _warn_of_unused(backend, self.specs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionMetadata:
        """Of every group; a shared prefix is taken apart by those with layers that see all of it.

        Raises:
            ValueError: a group refuses the batch, or to take its shared prefix apart.
        """
        common = common_attn_metadata
        parts = {}
        for name, builder in self._builders.items():
            shared = common_prefix_len if any(s.cascades for s in builder.specs) else 0
            parts[name] = builder.build(shared, common, fast_build)
        return self._assembled(parts, common)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> AttentionMetadata:
        common = common_attn_metadata
        parts = {n: b.build_for_drafting(common, draft_index) for n, b in self._builders.items()}
        return self._assembled(parts, common)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionMetadata:
        """As each group builds it. Groups too weak for the batch refuse to attend with it.

        Calls of those belong between graphs, with the metadata that `build` gives for each replay.
        """
        common = common_attn_metadata
        parts = {
            name: builder.build_for_cudagraph_capture(common)
            if takes(_level(builder), common)
            else _refusing(self._parts[name], builder, common)
            for name, builder in self._builders.items()
        }
        return self._assembled(parts, common)

    def prepare_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionMetadata | None:
        """Of every group, if one of them plans on the host; else None: the graph builds all.

        Raises:
            ValueError: another group would plan in the graph, which now has no place for it.
        """
        common = common_attn_metadata
        able = {n: b for n, b in self._builders.items() if takes(_level(b), common)}
        prepared = {n: b.prepare_capture(common) for n, b in able.items()}
        parts = {n: part for n, part in prepared.items() if part is not None}
        planned = tuple(parts)
        if not planned:
            return None
        for name, builder in self._builders.items():
            if name not in able:
                parts[name] = _refusing(self._parts[name], builder, common)
            elif name not in planned:
                parts[name] = _planless(builder, common, planned)
        return self._assembled(parts, common, planned)

    def prepare_replay(
        self, metadata: AttentionMetadata, common_attn_metadata: CommonAttentionMetadata
    ) -> None:
        """Of the groups that were prepared.

        Raises:
            ValueError: the metadata is not that of a captured step.
        """
        views = metadata.views
        if not views.prepared:
            raise ValueError(f"metadata must come from prepare_capture, got {metadata}")
        for name in views.prepared:
            self._builders[name].prepare_replay(views.groups[name], common_attn_metadata)

    def profile_run(self, max_num_tokens: int) -> int:
        """Of all groups: each keeps its own."""
        return sum(b.profile_run(max_num_tokens) for b in self._builders.values())

    @property
    def cascades_on_device(self) -> bool:
        """No: groups take a prefix apart by `build` alone."""
        return False

    def use_cascade_attention(self, *args: Any, **keywords: Any) -> bool:
        """Whether every group with layers that see all of the prefix would take it apart."""
        asked = [b for b in self._builders.values() if any(s.cascades for s in b.specs)]
        return bool(asked) and all(b.use_cascade_attention(*args, **keywords) for b in asked)

    def _assembled(
        self,
        parts: Mapping[str, AttentionMetadata],
        common: CommonAttentionMetadata,
        prepared: tuple[str, ...] = (),
    ) -> AttentionMetadata:
        """One step's metadata of what the groups built: as it is, chunked, and in a cascade."""
        plain = {s: parts[name] for name, s in self._layers() if s.attention_chunk_size is None}
        views = Views(
            chunked=self._chunks_of(parts),
            cascade=self._cascade_of(plain),
            groups=dict(parts),
            prepared=prepared,
            logits_rows=LogitsRows(self.build_logits_rows),
        )
        return self._routed(common, plain, views)

    def _chunks_of(self, parts: Mapping[str, AttentionMetadata]) -> dict[int, AttentionMetadata]:
        """Virtual batches by chunk size, each of those that the groups made."""
        chunked: dict[int, dict[AttentionSpec, AttentionMetadata]] = {}
        for name, spec in self._layers():
            chunk = spec.attention_chunk_size
            if chunk is not None:
                plain = dataclasses.replace(spec, attention_chunk_size=None)
                chunked.setdefault(chunk, {})[plain] = parts[name].views.chunked[chunk]
        return {
            chunk: self._routed(next(iter(plans.values())).common, plans)
            for chunk, plans in chunked.items()
        }

    def _cascade_of(
        self, plans: Mapping[AttentionSpec, AttentionMetadata]
    ) -> tuple[AttentionMetadata, AttentionMetadata] | None:
        """Prefix and rest of every group; all have taken the same prefix apart, or none has."""
        prefixes: dict[AttentionSpec, AttentionMetadata] = {}
        rests: dict[AttentionSpec, AttentionMetadata] = {}
        whole = [spec for spec in plans if spec.cascades]
        for spec in whole:
            cascade = plans[spec].views.cascade
            if cascade is not None:
                prefixes[spec.of_shared_prefix()], rests[spec] = cascade
        if not rests:
            return None
        assert len(rests) == len(whole), "one prefix, one block size: all groups or none"
        first_prefix, first_rest = next(iter(prefixes.values())), next(iter(rests.values()))
        return (
            self._routed(first_prefix.common, prefixes),
            self._routed(first_rest.common, rests),
        )

    def _routed(
        self,
        common: CommonAttentionMetadata,
        plans: Mapping[AttentionSpec, AttentionMetadata],
        views: Views | None = None,
    ) -> AttentionMetadata:
        return AttentionMetadata(common, self._backend, plans, self.block_size, views=views)

    def _layers(self) -> list[tuple[str, AttentionSpec]]:
        return [(name, spec) for name, specs in self._groups.items() for spec in specs]


def _planless(
    builder: AttentionMetadataBuilder, common: CommonAttentionMetadata, planned: Sequence[str]
) -> AttentionMetadata:
    """Metadata made before the capture of a group that has nothing to compute in the graph."""
    metadata = builder.build_for_cudagraph_capture(common)
    views, window = metadata.views, metadata.views.window
    plans = [*metadata.plans.values(), *(window.plans.values() if window is not None else ())]
    if not views.chunked and all(plan is None for plan in plans):
        return metadata
    raise ValueError(
        f"group {builder.backend.name} must plan nothing in a captured graph beside "
        f"{', '.join(planned)}, which plans on the host, got plans or virtual batches; capture "
        "piecewise, or choose another backend for one of the groups"
    )


def _refusing(
    backend: Backend, builder: AttentionMetadataBuilder, common: CommonAttentionMetadata
) -> AttentionMetadata:
    """Metadata that names the group's backend, and raises where the group would be captured."""
    refusing = dataclasses.replace(backend, forward=_refuse, plan_of=None)
    chunked = {
        chunk: AttentionMetadata(common, refusing, block_size=builder.block_size)
        for chunk in {s.attention_chunk_size for s in builder.specs if s.attention_chunk_size}
    }
    views = Views(chunked=chunked)
    return AttentionMetadata(common, refusing, block_size=builder.block_size, views=views)


def _refuse(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    raise ValueError(
        f"group {meta.backend.name} must attend between captured graphs, got metadata for a "
        f"capture; its level is {meta.backend.support.cudagraph.name}: pass it that of build()"
    )


def _level(builder: AttentionMetadataBuilder) -> AttentionCGSupport:
    return builder.backend.support.cudagraph


def takes(level: AttentionCGSupport, common: CommonAttentionMetadata) -> bool:
    """Whether a backend of that level can be captured with this batch, padded as it is."""
    if level is AttentionCGSupport.UNIFORM_BATCH:
        return common.num_actual_tokens == common.num_reqs * common.max_query_len
    if level is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE:
        return common.max_query_len <= 1
    return level is AttentionCGSupport.ALWAYS


def _warn_of_unused(backend: GroupedBackend, specs: Sequence[AttentionSpec]) -> None:
    """A spec that no layer has is most often one that was written down wrongly."""
    for layers, part in backend.groups:
        if isinstance(layers, AttentionSpec) and layers not in specs:
            logger.warning(
                "backend %s: no layer for group %s has the geometry %s; the model's are %s",
                backend.name, part.name, layers, "; ".join(map(str, specs)),
            )  # fmt: skip
