"""What a backend is: a support declaration, a metadata builder and a forward function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from attn_ops.backends.checks import check_layer
from attn_ops.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionOptions,
    AttentionSpec,
    LatentOptions,
    Layer,
    Support,
)
from attn_ops.metadata.features import PER_HEAD

__all__ = ["AttentionOptions", "Backend", "Forward", "PlanOf", "Support", "VarlenForward"]

Forward = Callable[..., torch.Tensor]
"""forward(q [T, N, H], kv_cache [P, 2, B, K, H], meta, options) -> [T, N, H].

Of latent attention: forward(q [T, N, P + R], kv_cache [P, B, Lkv + R], meta, `LatentOptions`) ->
[T, N, V]. Of a backend with `plan_of`, what that gave is the fifth argument; a call by hand leaves
it out.
"""

VarlenForward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, AttentionOptions], torch.Tensor
]
"""varlen(q [T, N, H], k [T, K, H], v [T, K, V], meta, options) -> [T, N, V]: no cache."""

PlanOf = Callable[[AttentionMetadata, AttentionSpec], Any]
"""What calls of layers with one geometry share; looked up once a step and geometry."""

OWN_MASK = "its mask is its own; ask for it by name"
"""The reason against a backend with `Support.own_mask`."""


def nothing_missing() -> None:
    """Of a backend that runs wherever its support says."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """One attention backend.

    Attributes:
        name: upper case, as users write it.
        support: what it can do.
        builder: makes its metadata, once per step.
        forward: launches its kernels; reads the batch from the metadata.
        unavailable: why it cannot run on this machine at all (a missing library), or None. Imports
            nothing heavy until it is asked. Callers ask `missing`.
        varlen: attention over this step's own keys, without a cache; None: not supported.
        plan_of: finds what `forward` is given as its plan; None: it is given none.
    """

    name: str
    support: Support
    builder: type[AttentionMetadataBuilder]
    forward: Forward
    unavailable: Callable[[], str | None] = nothing_missing
    varlen: VarlenForward | None = None
    plan_of: PlanOf | None = None

    def get_builder_cls(self) -> type[AttentionMetadataBuilder]:
        """The builder, as code written for classes of backends asks for it."""
        return self.builder

    def missing(self) -> str | None:
        """Why it cannot run on this machine, or None. A probe that raises is a reason too.

        The probe may be another package's. It must not take other backends with it.
        """
        try:
            return self.unavailable()
        except Exception as error:
            return f"its unavailable() raised {type(error).__name__}: {error}"

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        """Every reason why this backend cannot take layers of geometry `spec`; empty if it can."""
        missing = self.missing()
        return ([missing] if missing else []) + self.support.reasons_against(
            spec, block_size, device
        )

    def resolve(
        self,
        meta: AttentionMetadata,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        options: AttentionOptions | LatentOptions,
        attention_chunk_size: int | None = None,
    ) -> Layer:
        """Check a call and find what computes it; `AttentionMetadata.layer` remembers it.

        Raises:
            ValueError: tensors and batch do not fit, or the backend does not support the call.
        """
        view = meta.view_of(options, attention_chunk_size)
        if view is not None:
            return view.backend.resolve(view, q, kv_cache, options).of_part(view)
        spec = check_layer(q, kv_cache, meta, options)
        per_head = tuple(f for f in PER_HEAD if getattr(options, f.name, None) is not None)
        if meta.views.cascade is not None and spec.cascades:
            return Layer(cascade=meta.views.cascade, per_head=per_head)
        plan = None if self.plan_of is None else self.plan_of(meta, spec)
        return Layer(plan, per_head=per_head)
