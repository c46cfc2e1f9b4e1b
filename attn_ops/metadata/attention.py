"""The batch as one backend reads it: an opaque graph input that a builder makes once a step.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from attn_ops.compat.opaque_until_2_15 import register_opaque_reference
from attn_ops.metadata.common import CommonAttentionMetadata
from attn_ops.metadata.fast_prefill import all_rows_are_logits_rows
from attn_ops.metadata.features import (
    AttentionOptions,
    AttentionSpec,
    Feature,
    Support,
    layer_key,
)
from attn_ops.metadata.latent import LatentOptions, latent_key
from attn_ops.metadata.opaque import OfABatch

M = TypeVar("M")
"""A backend's metadata."""

T = TypeVar("T")


class AttentionBackend(Protocol):
    """What a step asks of its backend; `attn_ops.backends.Backend` answers it."""

    @property
    def name(self) -> str: ...

    @property
    def support(self) -> Support: ...

    @property
    def forward(self) -> Callable[..., torch.Tensor]: ...

    @property
    def varlen(self) -> Callable[..., torch.Tensor] | None: ...

    def resolve(
        self,
        meta: "AttentionMetadata",
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        options: AttentionOptions | LatentOptions,
        attention_chunk_size: int | None = None,
    ) -> "Layer":
        """Check a call and find what computes it.

        Raises:
            ValueError: tensors and batch do not fit, or the backend does not support the call.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """What computes layers of one geometry over a step. The first call found and checked it.

    It does not refer to the step's metadata, which remembers it: that would outlive the step.
    """

    plan: Any = None  # what the backend's `plan_of` gives; None: nothing
    part: "AttentionMetadata | None" = None  # of its group, or virtual batches; None: the step's
    cascade: "tuple[AttentionMetadata, AttentionMetadata] | None" = None  # prefix and rest; or None
    per_head: tuple[Feature, ...] = ()  # that the layer has; their tensors differ by layer

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: "AttentionMetadata",
        options: AttentionOptions | LatentOptions,
    ) -> torch.Tensor:
        """The backend's forward: q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H].

        `meta` is the step's, by which the layer was found.
        """
        if self.part is not None:
            meta = self.part
        if self.plan is None:
            return meta.backend.forward(q, kv_cache, meta, options)
        return meta.backend.forward(q, kv_cache, meta, options, self.plan)

    def of_part(self, part: "AttentionMetadata") -> "Layer":
        """The layer as the whole step has it, that was found by metadata of a part of the step."""
        return self if self.part is not None else dataclasses.replace(self, part=part)


class LogitsRows:
    """A step reduced to the rows whose logits are wanted.

    Args:
        reduce: makes the metadata of the reduced batch; None: nobody can.

    Attributes:
        asked: whether a layer has asked for it.
        metadata: of the reduced batch; None before that, and where all rows count.
    """

    def __init__(
        self, reduce: "Callable[[CommonAttentionMetadata], AttentionMetadata] | None" = None
    ) -> None:
        self._reduce = reduce
        self.asked = False
        self.metadata: AttentionMetadata | None = None

    def of(self, step: "AttentionMetadata") -> "AttentionMetadata":
        """The reduced metadata of `step`, made when first asked for; itself if all rows count.

        Raises:
            ValueError: the batch does not say which rows those are, or is not to be reduced.
        """
        if not self.asked:
            self.metadata = self._made(step)
            self.asked = True
        return step if self.metadata is None else self.metadata

    def _made(self, step: "AttentionMetadata") -> "AttentionMetadata | None":
        if not step.common.causal:
            raise ValueError("common.causal must be True where logits rows attend, got False")
        if all_rows_are_logits_rows(step.common):
            return None
        if self._reduce is None:
            raise ValueError(
                f"attn_metadata must come from build() of backend {step.backend.name}'s builder "
                "for a model with fast prefill, got metadata without a way to reduce it"
            )
        return self._reduce(step.common)


@dataclasses.dataclass(frozen=True, eq=False)
class Views:
    """A step as some of its layers see it. The builder makes them with the metadata."""

    # Virtual batches for layers of chunked local attention, by chunk size.
    chunked: "Mapping[int, AttentionMetadata]" = dataclasses.field(default_factory=dict)
    # Attention over the prefix that all requests share, and over the rest; None: none is shared.
    cascade: "tuple[AttentionMetadata, AttentionMetadata] | None" = None
    # Of several backends, by name: what was prepared on the host for a capture.
    prepared: "Mapping[str, AttentionMetadata]" = dataclasses.field(default_factory=dict)
    # For layers with a window, where their caches have blocks of their own; None: they have not.
    window: "AttentionMetadata | None" = None
    logits_rows: LogitsRows = dataclasses.field(default_factory=LogitsRows)


class AttentionMetadata(OfABatch):
    """One step's batch for one backend. Opaque to the compiler: no attribute of it is guarded on.

    Attributes:
        common: the batch.
        backend: the backend whose kernels run; `attn_ops::attention` calls its `forward`.
        block_size: tokens a block holds, where known; the operators refuse a cache of another.
        paged: False: a batch without a KV cache, whose block table says nothing.
        plans: what the builder planned, by layer geometry or a part of it; of several backends:
            the metadata of the geometry's own.
        views: the step as some of its layers see it.

    Dynamo of torch 2.11 takes no subclass where an operator's schema names this class.
    """

    # As slots they are left out of `vars`, along which tensors' addresses are compared before every
    # replay. Tensors that a graph reads belong in `plans` or `views`: `_found` is not compared.
    __slots__ = ("_found", "backend")

    def __init__(
        self,
        common: CommonAttentionMetadata,
        backend: AttentionBackend,
        plans: Mapping[Any, Any] | None = None,
        block_size: int | None = None,
        paged: bool = True,
        views: Views | None = None,
    ) -> None:
        self.common = common
        self.backend = backend
        self.plans: dict[Any, Any] = {} if plans is None else dict(plans)
        self.block_size = block_size
        self.paged = paged
        self.views = Views() if views is None else views
        self._found: dict[Hashable, Any] = {}

    def layer(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        options: AttentionOptions,
        attention_chunk_size: int | None = None,
    ) -> Layer:
        """What computes a call, and that it may be computed: asked in full once a geometry.

        Found by plain values: to make and hash an `AttentionSpec` takes as long as a small kernel.

        Raises:
            ValueError: tensors and batch do not fit, or the backend does not support the call.
        """
        common = self.common
        key = layer_key(
            q, kv_cache, options, common.num_actual_tokens, common.causal, attention_chunk_size
        )
        found = self._found.get(key)
        if found is None:
            found = self.backend.resolve(self, q, kv_cache, options, attention_chunk_size)
            self._found[key] = found
        return found

    def latent_layer(
        self, q: torch.Tensor, kv_cache: torch.Tensor, options: LatentOptions
    ) -> Layer:
        """`layer` of a call of latent attention: q [T, N, P + R], kv_cache [P, B, Lkv + R]."""
        common = self.common
        key = latent_key(q, kv_cache, options, common.num_actual_tokens, common.causal)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self.backend.resolve(self, q, kv_cache, options)
        return found

    def view_of(
        self, options: AttentionOptions | LatentOptions, attention_chunk_size: int | None
    ) -> "AttentionMetadata | None":
        """The step as such a layer sees it, if that is not the step as it is.

        Raises:
            ValueError: the builder made no virtual batches for the layer, or no batch of windows.
        """
        if isinstance(options, LatentOptions):
            return None
        if attention_chunk_size is not None:
            return self._virtual(attention_chunk_size, options)
        if options.sliding_window is None or self.common.window_block_table_tensor is None:
            return None
        if self.views.window is None:
            raise ValueError(
                "attn_metadata must be that of a builder with takes_windows, as layers with a "
                "window have blocks of their own, got that of another with backend "
                f"{self.backend.name}"
            )
        return self.views.window

    def _virtual(self, chunk: int, options: AttentionOptions) -> "AttentionMetadata":
        """The virtual batches for layers of chunked local attention."""
        for name in ("sliding_window", "alibi_slopes"):
            if getattr(options, name) is not None:
                raise ValueError(f"{name} must be None with attention_chunk_size, got a value")
        if chunk not in self.views.chunked:
            known = ", ".join(map(str, sorted(self.views.chunked))) or "none"
            raise ValueError(
                "attention_chunk_size must be that of a spec which the metadata's builder was "
                f"given, got {chunk}; supported: {known}"
            )
        return self.views.chunked[chunk]

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made by the first of the step's calls that asks for `key`."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def planned(self, spec: AttentionSpec) -> Any:
        """What was planned for layers of geometry `spec`; None: nothing.

        Layers are as causal as the batch, whatever the spec says that the builder was given.
        """
        found = self.plans.get(spec)
        if found is None and spec.attention_chunk_size is None:
            found = self.plans.get(dataclasses.replace(spec, causal=not spec.causal))
        return found

    def replace(self, **changes: Any) -> "AttentionMetadata":
        """A copy with other arguments of the class; another batch needs other `plans`, `views`."""
        names = ("common", "backend", "plans", "block_size", "paged", "views")
        return AttentionMetadata(**{n: getattr(self, n) for n in names} | changes)

    def logits_rows(self, num_rows: int) -> "AttentionMetadata":
        """The step reduced to the rows whose logits are wanted, for layers that see only those.

        Made when first asked for. The same metadata, where all rows are wanted.

        Args:
            num_rows: rows that the layer sees; as many as the batch says, padding included.

        Raises:
            ValueError: the batch does not say which rows those are, they are others or, as far as
                the host sees, not the last of their requests.
        """
        reduced = self.views.logits_rows.of(self)
        if reduced is not self and self.num_logits_rows != num_rows:
            raise ValueError(
                f"logits rows must be those of the batch, {self.num_logits_rows} with padding, "
                f"got {num_rows}"
            )
        return reduced

    @property
    def has_logits_rows(self) -> bool:
        """Whether a layer has asked for `logits_rows`."""
        return self.views.logits_rows.asked

    def wants_no_logits(self, num_rows: int) -> bool:
        """Whether a layer that sees `num_rows` rows is right to see none: the batch wants none."""
        return num_rows == 0 == self.num_logits_rows

    @property
    def num_logits_rows(self) -> int:
        """Entries of the batch's logits indices, padding included."""
        padded = self.common.logits_indices_padded
        indices = self.common.logits_indices if padded is None else padded
        return 0 if indices is None else indices.shape[0]

    def __repr__(self) -> str:
        c = self.common
        return (
            f"AttentionMetadata({self.backend.name}, num_reqs={c.num_reqs}, "
            f"num_tokens={c.num_actual_tokens}, max_query_len={c.max_query_len}, "
            f"max_seq_len={c.max_seq_len})"
        )


METADATA_TYPE = register_opaque_reference(AttentionMetadata)
"""Name of `AttentionMetadata` in an operator's schema."""
