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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """What a layer asks for beyond q, the cache and the batch.

    Scores are scale * q.k, capped, lowered by ALiBi, masked; the softmax runs over them and the
    head's sink. T tokens, N query heads.
    """

    scale: float  # factor on q.k
    sliding_window: int | None = None  # keys a query sees, its own included; None: all
    soft_cap: float | None = None  # c in c * tanh(s / c); None: none
    alibi_slopes: torch.Tensor | None = None  # [N] float32: score -= slope * |query - key|
    sinks: torch.Tensor | None = None  # [N] float32 or q's dtype: a logit more, of value 0
    kv_cache_dtype: str = "auto"  # of KV_CACHE_DTYPES
    k_scale: torch.Tensor | None = None  # [1] float32: FP8 keys mean stored * k_scale; None: 1
    v_scale: torch.Tensor | None = None  # [1] float32: the same for values
    lse: torch.Tensor | None = None  # [T, N] float32, written: log of the softmax's denominator
    checked: bool = False  # the operator has checked shapes, dtypes and support

    def spec(self, q: torch.Tensor, kv_cache: torch.Tensor, causal: bool) -> AttentionSpec:
        """Geometry of the layer, as the builder was given it."""
        return AttentionSpec(
            num_heads=q.shape[1],
            num_kv_heads=kv_cache.shape[3],
            head_size=q.shape[2],
            dtype=q.dtype,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            kv_cache_dtype=self.kv_cache_dtype,
            alibi=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
            causal=causal,
        )


Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, AttentionOptions], torch.Tensor]
"""forward(q [T, N, H], kv_cache [P, 2, B, K, H], meta, options) -> [T, N, H]."""

VarlenForward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, AttentionOptions], torch.Tensor
]
"""varlen(q [T, N, H], k [T, K, H], v [T, K, V], meta, options) -> [T, N, V]: no cache."""


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
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    alibi: bool = False
    sinks: bool = False
    non_causal: bool = False
    non_causal_window: bool = True  # with `non_causal` and `sliding_window`: both at once
    lse: bool = False  # can write the log-sum-exp
    varlen_v_head_size: bool = False  # without a cache, values may have a head size of their own
    quantizes_query: bool = False  # with an FP8 cache q is rounded to FP8 too
    own_mask: bool = False  # rows see what the backend's own mask says; only taken by name

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
        if spec.kv_cache_dtype not in self.kv_cache_dtypes:
            reasons.append(
                f"kv_cache_dtype must be supported, got {spec.kv_cache_dtype}; "
                f"supported: {', '.join(self.kv_cache_dtypes)}"
            )
        for name, asked, able in (
            ("alibi_slopes", spec.alibi, self.alibi),
            ("sinks", spec.sinks, self.sinks),
        ):
            if asked and not able:
                reasons.append(f"{name} must be None, got a tensor; supported: None")
        chunk = spec.attention_chunk_size
        if chunk is not None and chunk % block_size:
            reasons.append(
                f"attention_chunk_size must be a multiple of block_size {block_size}, got {chunk}"
            )
        if not spec.causal and not self.non_causal:
            reasons.append("causal must be True, got False; supported: True")
        elif not spec.causal and spec.sliding_window is not None and not self.non_causal_window:
            reasons.append(
                f"sliding_window must be None without causal, got {spec.sliding_window}; "
                "supported: None"
            )
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
        varlen: attention over this step's own keys, without a cache; None: not supported.
    """

    name: str
    support: Support
    builder: type[AttentionMetadataBuilder]
    forward: Forward
    unavailable: Callable[[], str | None]
    varlen: VarlenForward | None = None

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
