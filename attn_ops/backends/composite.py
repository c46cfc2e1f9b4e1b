"""Several backends as one: a rule names the backend of each layer of each batch.

AUTO and AUTO_MLA go by the sizes of the batch, `grouped_backend` by the geometry of the layer. A
batch whose layers are all on one backend has that backend's metadata. Any other has metadata of
every backend that has layers, in one `AttentionMetadata`; a call of an operator is routed by what
it knows of its layer.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from attn_ops.backends.base import Backend
from attn_ops.backends.checks import spec_of
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionOptions,
    AttentionSpec,
    CommonAttentionMetadata,
    LatentOptions,
    Layer,
    LogitsRows,
    Views,
)


class Sizes(NamedTuple):
    """What a rule may know of a batch: the sizes that a captured graph freezes."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int


Rule = Callable[[AttentionSpec, Sizes], Backend]
"""The backend for layers of a geometry in a batch of such sizes."""

_EXTREMES = (Sizes(1, 1, 1), Sizes(1 << 20, 1 << 20, 1 << 20))
"""Batches that a rule is asked about to learn which backends layers may go to."""


@dataclasses.dataclass(frozen=True)
class CompositeBackend(Backend):
    """A backend made of others, its `parts`."""

    parts: tuple[Backend, ...] = ()
    rule: Rule = dataclasses.field(kw_only=True)

    def used(self, specs: Sequence[AttentionSpec]) -> dict[str, list[AttentionSpec]]:
        """By backend, the distinct geometries that may go to it; none without any."""
        found: dict[str, list[AttentionSpec]] = {}
        for spec in dict.fromkeys(specs):
            for name in dict.fromkeys(self.rule(spec, sizes).name for sizes in _EXTREMES):
                found.setdefault(name, []).append(spec)
        return {part.name: found[part.name] for part in self.parts if part.name in found}

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        """Those of every backend that the layer may go to."""
        used = self.used((spec,))
        return super().reasons_against(spec, block_size, device) or [
            f"{part.name}: {reason}"
            for part in self.parts
            if part.name in used
            for reason in part.reasons_against(spec, block_size, device)
        ]

    def resolve(
        self,
        meta: AttentionMetadata,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        options: AttentionOptions | LatentOptions,
        attention_chunk_size: int | None = None,
    ) -> Layer:
        """The layer as its own backend finds it, which checks it too."""
        spec = spec_of(q, kv_cache, options, meta.common.causal)
        part = part_of(meta, dataclasses.replace(spec, attention_chunk_size=attention_chunk_size))
        if isinstance(options, LatentOptions):
            return part.latent_layer(q, kv_cache, options).of_part(part)
        return part.layer(q, kv_cache, options, attention_chunk_size).of_part(part)


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """By the layer's own backend: q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H].

    Raises:
        ValueError: the builder was not given the layer, or its backend does not support the call.
    """
    return meta.layer(q, kv_cache, options).attend(q, kv_cache, meta, options)


def part_of(meta: AttentionMetadata, spec: AttentionSpec) -> AttentionMetadata:
    """The metadata of the backend that has layers of geometry `spec`.

    Raises:
        ValueError: the builder was not given such a layer.
    """
    part = meta.planned(spec)
    if part is None:
        raise ValueError(
            f"layer must be one that the builder of backend {meta.backend.name} was given, "
            f"got {spec}; supported: {'; '.join(map(str, meta.plans))}"
        )
    return part


def weakest(parts: Sequence[Backend]) -> AttentionCGSupport:
    """Which batches all of the backends can be captured with."""
    return min((part.support.cudagraph for part in parts), key=lambda level: level.value)


def builder_for(
    parts: Sequence[Backend], base: "type[CompositeMetadataBuilder] | None" = None
) -> type[AttentionMetadataBuilder]:
    """A class of builders that declares what the builders of the parts do together."""
    builders = [part.builder for part in parts]
    base = base or CompositeMetadataBuilder
    return type(
        base.__name__,
        (base,),
        {
            "parts": tuple(parts),
            "cudagraph_support": weakest(parts),
            "plans_on_host": any(one.plans_on_host for one in builders),
            "plans_in_turn": any(getattr(one, "plans_in_turn", False) for one in builders),
            "takes_windows": all(getattr(one, "takes_windows", False) for one in builders),
        },
    )


class CompositeMetadataBuilder(AttentionMetadataBuilder):
    """A builder of each backend that may get layers.

    Raises:
        ValueError: a backend does not take its layers, or two want batches in different orders.
    """

    def __init__(
        self,
        backend: CompositeBackend,
        specs: Sequence[AttentionSpec],
        block_size: int,
        device: torch.device | str,
        **keywords: Any,
    ) -> None:
        super().__init__(backend, specs, block_size, device, **keywords)
        self._backend = backend
        used = backend.used(self.specs)
        self._builders = {
            part.name: part.builder(part, used[part.name], block_size, device, **keywords)
            for part in backend.parts
            if part.name in used
        }
        thresholds = {name: b.reorder_batch_threshold for name, b in self._builders.items()}
        wanted = set(thresholds.values()) - {None}
        if len(wanted) > 1:
            raise ValueError(
                f"parts of backend {backend.name} must want one order of a batch, "
                f"got reorder_batch_threshold {thresholds}"
            )
        self.reorder_batch_threshold = wanted.pop() if wanted else None
        for builder in self._builders.values():  # a shared prefix is one long request
            best = backend.rule(builder.specs[0], _EXTREMES[1])
            builder.prefix_builder = self._builders[best.name]

    def _chosen(self, common: CommonAttentionMetadata) -> dict[AttentionSpec, str]:
        """The name of each layer's backend in this batch."""
        sizes = Sizes(common.num_reqs, common.max_query_len, common.max_seq_len)
        return {spec: self._backend.rule(spec, sizes).name for spec in self.specs}

    def _each(
        self,
        common: CommonAttentionMetadata,
        build: Callable[[AttentionMetadataBuilder], AttentionMetadata],
    ) -> AttentionMetadata:
        """What `build` gives for every backend that has layers in this batch, in one."""
        chosen = self._chosen(common)
        parts = {name: build(self._builders[name]) for name in dict.fromkeys(chosen.values())}
        return self._joined(chosen, parts, common)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionMetadata:
        """A shared prefix is taken apart by the backends with layers that see all of it.

        Raises:
            ValueError: a backend refuses the batch, or to take its shared prefix apart.
        """

        def built(builder: AttentionMetadataBuilder) -> AttentionMetadata:
            shared = common_prefix_len if any(s.cascades for s in builder.specs) else 0
            return builder.build(shared, common_attn_metadata, fast_build)

        return self._each(common_attn_metadata, built)

    def build_cascade(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        shared_lens: torch.Tensor,
        group_starts: torch.Tensor,
    ) -> AttentionMetadata:
        batch = (common_attn_metadata, shared_lens, group_starts)
        return self._each(common_attn_metadata, lambda builder: builder.build_cascade(*batch))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionMetadata:
        """Backends too weak for the batch refuse to attend with it, if another takes it.

        Calls of those belong between graphs, with the metadata that `build` gives for each replay.
        """
        common = common_attn_metadata
        alone = len(set(self._chosen(common).values())) == 1

        def built(builder: AttentionMetadataBuilder) -> AttentionMetadata:
            if alone or builder.backend.support.cudagraph.takes(common):
                return builder.build_for_cudagraph_capture(common)
            return self._refusing(builder, common)

        return self._each(common, built)

    def prepare_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionMetadata | None:
        """Of every backend, if one of them plans on the host; else None: the graph builds all.

        Raises:
            ValueError: another would plan in the graph, which now has no place for it.
        """
        common, chosen = common_attn_metadata, self._chosen(common_attn_metadata)
        parts, prepared = {}, []
        for name in dict.fromkeys(chosen.values()):
            builder = self._builders[name]
            if not builder.backend.support.cudagraph.takes(common):
                parts[name] = self._refusing(builder, common)
            elif (part := builder.prepare_capture(common)) is not None:
                parts[name] = part
                prepared.append(name)
        if not prepared:
            return None
        for name in chosen.values():
            if name not in parts:
                parts[name] = _planless(self._builders[name], common, prepared)
        return self._joined(chosen, parts, common, prepared)

    def prepare_replay(
        self, metadata: AttentionMetadata, common_attn_metadata: CommonAttentionMetadata
    ) -> None:
        """Of the backends that were prepared.

        Raises:
            ValueError: the metadata is not that of a captured step.
        """
        if not metadata.views.prepared:
            raise ValueError(f"metadata must come from prepare_capture, got {metadata}")
        for name, part in metadata.views.prepared.items():
            self._builders[name].prepare_replay(part, common_attn_metadata)

    def profile_run(self, max_num_tokens: int) -> int:
        """Of all backends: each keeps its own."""
        return sum(b.profile_run(max_num_tokens) for b in self._builders.values())

    @property
    def cascades_on_device(self) -> bool:
        """Not where single tokens are on several backends, which do so by `build` alone."""
        decodes = {self._backend.rule(spec, _EXTREMES[0]).name for spec in self.specs}
        return len(decodes) == 1 and all(b.cascades_on_device for b in self._builders.values())

    def use_cascade_attention(self, *args: Any, **keywords: Any) -> bool:
        """Whether every backend with layers that see all of the prefix would take it apart."""
        asked = [b for b in self._builders.values() if any(s.cascades for s in b.specs)]
        return bool(asked) and all(b.use_cascade_attention(*args, **keywords) for b in asked)

    def _joined(
        self,
        chosen: Mapping[AttentionSpec, str],
        parts: Mapping[str, AttentionMetadata],
        common: CommonAttentionMetadata,
        prepared: Sequence[str] = (),
    ) -> AttentionMetadata:
        """One step's metadata of what the backends built; that of a single one is handed on.

        Its logits rows are chosen for again: another backend may be the best for few rows.
        """
        rows = LogitsRows(self.build_logits_rows)
        if len(parts) == 1 and not prepared:
            (only,) = parts.values()
            return only.replace(views=dataclasses.replace(only.views, logits_rows=rows))
        plans = {spec: parts[name] for spec, name in chosen.items()}
        views = Views(prepared={name: parts[name] for name in prepared}, logits_rows=rows)
        return AttentionMetadata(common, self._backend, plans, self.block_size, views=views)

    def _refusing(
        self, builder: AttentionMetadataBuilder, common: CommonAttentionMetadata
    ) -> AttentionMetadata:
        """Metadata that names the builder's backend, and raises where it would be captured."""
        backend = next(part for part in self._backend.parts if part.name == builder.backend.name)
        refusing = dataclasses.replace(backend, forward=_refuse, plan_of=None)
        sizes = {s.attention_chunk_size for s in builder.specs if s.attention_chunk_size}
        made = AttentionMetadata(common, refusing, block_size=builder.block_size)
        return made.replace(views=Views(chunked=dict.fromkeys(sizes, made)))


def _planless(
    builder: AttentionMetadataBuilder, common: CommonAttentionMetadata, planned: Sequence[str]
) -> AttentionMetadata:
    """Metadata made before the capture by a backend that has nothing to compute in the graph."""
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


def _refuse(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    raise ValueError(
        f"group {meta.backend.name} must attend between captured graphs, got metadata for a "
        f"capture; its level is {meta.backend.support.cudagraph.name}: pass it that of build()"
    )
