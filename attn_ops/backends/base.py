"""What a backend is: a support declaration, a metadata builder and a forward function."""

import dataclasses
from collections.abc import Callable

import torch

from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
)

Forward = Callable[
    [torch.Tensor, torch.Tensor, AttentionMetadata, float, int | None, float | None], torch.Tensor
]
"""forward(q [T, N, H], kv_cache [P, 2, B, K, H], meta, scale, window, soft_cap) -> [T, N, H]."""


@dataclasses.dataclass(frozen=True)
class Support:
    """What a backend can do. The conformance suite tests this, and that the rest is refused."""

    devices: tuple[str, ...]  # device types
    dtypes: tuple[torch.dtype, ...]  # of q and the cache
    head_sizes: tuple[int, ...]  # empty: any
    block_sizes: tuple[int, ...]  # empty: any
    sliding_window: bool
    soft_cap: bool
    cudagraph: AttentionCGSupport

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        """Why a layer of geometry `spec` cannot run here.

        In the form 'x must be ..., got ...; supported: ...'.
        """
        reasons = []
        if device.type not in self.devices:
            reasons.append(
                f"device must be supported, got {device.type}; supported: {', '.join(self.devices)}"
            )
        if spec.dtype not in self.dtypes:
            reasons.append(
                f"dtype must be supported, got {_name(spec.dtype)}; "
                f"supported: {_names(self.dtypes)}"
            )
        if self.head_sizes and spec.head_size not in self.head_sizes:
            reasons.append(
                f"head_size must be supported, got {spec.head_size}; "
                f"supported: {_names(self.head_sizes)}"
            )
        if self.block_sizes and block_size not in self.block_sizes:
            reasons.append(
                f"block_size must be supported, got {block_size}; "
                f"supported: {_names(self.block_sizes)}"
            )
        if spec.sliding_window is not None and not self.sliding_window:
            reasons.append(
                f"sliding_window must be None, got {spec.sliding_window}; supported: None"
            )
        if spec.soft_cap is not None and not self.soft_cap:
            reasons.append(f"soft_cap must be None, got {spec.soft_cap}; supported: None")
        return reasons


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _names(values: tuple) -> str:
    return ", ".join(_name(v) for v in values)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One attention backend.

    Attributes:
        name: upper case, as users write it.
        support: what it can do.
        builder: makes its metadata, once per step.
        forward: launches its kernels; reads the batch from the metadata.
        unavailable: why it cannot run on this machine at all (a missing library), or None. Imports
            nothing heavy until it is asked.
    """

    name: str
    support: Support
    builder: type[AttentionMetadataBuilder]
    forward: Forward
    unavailable: Callable[[], str | None]

    def get_builder_cls(self) -> type[AttentionMetadataBuilder]:
        """The builder, as code written for classes of backends asks for it."""
        return self.builder

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        """Every reason why this backend cannot take layers of geometry `spec`; empty if it can."""
        missing = self.unavailable()
        return ([missing] if missing else []) + self.support.reasons_against(
            spec, block_size, device
        )
