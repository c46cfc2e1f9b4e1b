"""What attention layers may ask for: a layer's geometry, a call's options, a backend's support.

A new feature is an entry of `FEATURES` and a field of `AttentionOptions`, `FeatureArguments`,
`AttentionSpec` and `Support`. What forwards, checks and lists features names none of them.
docs/adding_a_backend.md lists the other files.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypedDict

import torch

from attn_ops.block_layout.tables import Blocksparse, BlockTables
from attn_ops.metadata.latent import LatentShape
from attn_ops.output_quant.schemes import QuantizedOutput

KV_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""What a KV cache may hold: the model's dtype, or FP8 in uint8 storage."""


def kv_dtype_of(kv_cache_dtype: str) -> torch.dtype | None:
    """FP8 dtype of a cache; None: the model's. "fp8" is E4M3, as other projects call it.

    Raises:
        ValueError: the name is not known.
    """
    if kv_cache_dtype == "fp8":
        return torch.float8_e4m3fn
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype must be known, got {kv_cache_dtype!r}; "
            f"supported: {', '.join(KV_CACHE_DTYPES)}, fp8"
        )
    return KV_CACHE_DTYPES[kv_cache_dtype]


class AttentionCGSupport(Enum):
    """Which batches a backend can take inside a captured CUDA graph."""

    ALWAYS = 3
    """Any batch, prefill and decode mixed."""
    UNIFORM_BATCH = 2
    """Batches in which every query has the same length."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Batches in which every query is one token."""
    NEVER = 0
    """None."""

    def takes(self, common: Any) -> bool:
        """Whether a backend of this level can capture that `CommonAttentionMetadata`."""
        if self is AttentionCGSupport.UNIFORM_BATCH:
            return common.num_actual_tokens == common.num_reqs * common.max_query_len
        if self is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE:
            return common.max_query_len <= 1
        return self is AttentionCGSupport.ALWAYS


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something that a layer may ask for and a backend may refuse."""

    name: str  # argument of the operators, field of `AttentionOptions`; None: not asked for
    declared: str  # field of `AttentionSpec` and of `Support`
    title: str  # column of the support table
    schema: str = "Tensor?"  # its type in the operators' schemas
    per_head: bool = False  # a tensor [N], of which a spec says whether it is there; else a number
    in_q_dtype: bool = False  # the tensor may have q's dtype instead of float32
    once: bool = False  # belongs to the softmax, not to a key: of two parts of the keys one has it


FEATURES = (
    Feature("sliding_window", "sliding_window", "sliding window", schema="int?"),
    Feature("soft_cap", "soft_cap", "soft cap", schema="float?"),
    Feature("alibi_slopes", "alibi", "ALiBi", per_head=True),
    Feature("sinks", "sinks", "sinks", per_head=True, in_q_dtype=True, once=True),
    Feature("sparse_block_size", "blocksparse", "block-sparse", schema="int?"),
)
"""All of them, in the order in which they are listed and refused."""

PER_HEAD = tuple(feature for feature in FEATURES if feature.per_head)
"""Those that are a tensor [N]."""

SCHEMA = ", ".join(
    [*(f"{f.schema} {f.name}=None" for f in FEATURES), "Tensor[]? block_layout=None"]
)
"""Arguments of an operator's schema that ask for them; `block_layout` goes with block sparsity."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Geometry of one attention layer. Layers with equal specs share a plan.

    Lengths are in tokens; `sliding_window` counts the query's own token, as in Transformers and
    FlashAttention's `window - 1` to the left. `dtype` is that of q; the cache holds it too unless
    `kv_cache_dtype` says otherwise. With `latent`, `num_kv_heads` is 1 and `head_size` that of a
    token in the cache, see `AttentionSpec.of_latent`.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int | None = None
    soft_cap: float | None = None
    kv_cache_dtype: str = "auto"  # or fp8_e4m3, fp8_e5m2: stored as uint8
    alibi: bool = False  # scores are lowered with the distance of query and key
    sinks: bool = False  # the softmax has one more, learned, logit a head
    causal: bool = True
    attention_chunk_size: int | None = None  # a query sees its own chunk of keys only (Llama 4)
    latent: LatentShape | None = None  # keys and values come from one latent a token (MLA)
    blocksparse: int | None = None  # tokens of a block, where a layout says which blocks are seen

    def __post_init__(self) -> None:
        if kv_dtype_of(self.kv_cache_dtype) is torch.float8_e4m3fn:
            object.__setattr__(self, "kv_cache_dtype", "fp8_e4m3")
        for name in ("num_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window must be None or at least 1, got {self.sliding_window}"
            )
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(
                f"soft_cap must be None or above 0, got {self.soft_cap}; supported: finite numbers"
            )
        if self.attention_chunk_size is not None:
            self._check_alone("attention_chunk_size", sliding_window=None, alibi=False, causal=True)
        if self.blocksparse is not None:
            plain = {"sliding_window": None, "attention_chunk_size": None, "causal": True}
            self._check_alone("blocksparse", **plain)
        if self.latent is not None:
            self._check_latent(self.latent)

    @classmethod
    def of_latent(
        cls, num_heads: int, latent: LatentShape, dtype: torch.dtype, **fields: Any
    ) -> "AttentionSpec":
        """Geometry of a layer with latent attention; `fields` are the other fields."""
        return cls(num_heads, 1, latent.cache_width, dtype, latent=latent, **fields)

    def _check_latent(self, latent: LatentShape) -> None:
        wanted = (1, latent.cache_width)
        got = (self.num_kv_heads, self.head_size)
        for name, want, have in zip(("num_kv_heads", "head_size"), wanted, got, strict=True):
            if have != want:
                raise ValueError(f"{name} must be {want} with {latent}, got {have}")

    def _check_alone(self, name: str, **plain: object) -> None:
        """Raise a ValueError unless the number `name` fits, and the fields in `plain` are so."""
        size = getattr(self, name)
        if size < 1:
            raise ValueError(f"{name} must be None or at least 1, got {size}")
        for other, wanted in plain.items():
            value = getattr(self, other)
            if value != wanted:
                raise ValueError(f"{other} must be {wanted} with {name} {size}, got {value}")

    @property
    def cache_dtype(self) -> torch.dtype:
        """dtype of the cache tensor; FP8 is stored as uint8."""
        return self.dtype if self.kv_cache_dtype == "auto" else torch.uint8

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[P, 2, B, K, H] of keys and values; with `latent` [P, B, Lkv + R]."""
        if self.latent is not None:
            return (num_blocks, block_size, self.head_size)
        return (num_blocks, 2, block_size, self.num_kv_heads, self.head_size)

    def block_size_of(self, kv_cache: torch.Tensor) -> int:
        """Tokens that a block of the layer's cache holds."""
        return kv_cache.shape[2 if self.latent is None else 1]

    @property
    def cascades(self) -> bool:
        """Whether a prefix that requests share can be taken apart: rows see all of it."""
        plain = self.sliding_window is None and self.attention_chunk_size is None
        plain = plain and self.blocksparse is None
        return plain and self.causal and not self.alibi

    def of_shared_prefix(self) -> "AttentionSpec":
        """The geometry over a prefix that requests share; the rest of the keys has it as it is."""
        return dataclasses.replace(
            self, causal=False, **{f.declared: False for f in FEATURES if f.once}
        )


class FeatureArguments(TypedDict, total=False):
    """The features as keyword arguments, for what passes them on."""

    sliding_window: int | None
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    blocksparse: Blocksparse | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """What a layer asks for beyond q, the cache and the batch.

    Scores are scale * q.k, capped, lowered by ALiBi, masked; the softmax runs over them and the
    head's sink.
    """

    scale: float  # factor on q.k
    sliding_window: int | None = None  # keys a query sees, its own included; None: all
    soft_cap: float | None = None  # c in c * tanh(s / c); None: none
    alibi_slopes: torch.Tensor | None = None  # [N] float32: score -= slope * |query - key|
    sinks: torch.Tensor | None = None  # [N] float32 or q's dtype: a logit more, of value 0
    sparse_block_size: int | None = None  # tokens of a block of `block_layout`; None: all are seen
    block_layout: Sequence[torch.Tensor] | None = None  # `BlockTables.tensors`
    kv_cache_dtype: str = "auto"  # of KV_CACHE_DTYPES
    k_scale: torch.Tensor | None = None  # [1] float32: FP8 keys mean stored * k_scale; None: 1
    v_scale: torch.Tensor | None = None  # [1] float32: the same for values
    lse: torch.Tensor | None = None  # [T, N] float32, written: log of the softmax's denominator
    quant: QuantizedOutput | None = None  # written; single tokens, declared schemes only
    checked: bool = False  # the operator has checked shapes, dtypes and support

    def spec(self, q: torch.Tensor, kv_cache: torch.Tensor, causal: bool) -> AttentionSpec:
        """Geometry of the layer, as the builder was given it; `kv_cache` [P, 2, B, K, H]."""
        return self.geometry(q, kv_cache.shape[3], causal)

    def geometry(self, q: torch.Tensor, num_kv_heads: int, causal: bool) -> AttentionSpec:
        """Geometry of the layer, with or without a cache; q [T, N, H]."""
        return AttentionSpec(
            num_heads=q.shape[1],
            num_kv_heads=num_kv_heads,
            head_size=q.shape[2],
            dtype=q.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            causal=causal,
            **spec_fields({f.name: getattr(self, f.name) for f in FEATURES}),
        )

    def has_only(self, *names: str) -> bool:
        """Whether the layer has no other features than these."""
        return all(getattr(self, f.name) is None for f in FEATURES if f.name not in names)

    def of_shared_prefix(self) -> "AttentionOptions":
        """What the layer asks for over a prefix that requests share; the rest has it as it is."""
        return dataclasses.replace(self, **{f.name: None for f in FEATURES if f.once})


_ASKED = [f"o.{f.name}{' is None' if f.per_head else ''}" for f in FEATURES]
_ASKED += ["o.kv_cache_dtype", "o.lse is None"]

options_key: Callable[[AttentionOptions], tuple] = eval(f"lambda o: ({', '.join(_ASKED)})")
"""Plain values of options, by which calls of equal geometry are found.

Written out from the declaration: 0.2 us a call, where a loop takes 0.9 (AMD EPYC, 2026-11-22).
"""

layer_key: Callable[..., tuple] = eval(
    "lambda q, c, o, rows, causal, chunk: (q.shape, q.dtype, q.get_device(), c.shape, c.dtype, "
    f"c.get_device(), rows, causal, chunk, {', '.join(_ASKED)})"
)
"""The same with what else tells one layer of a step from another, for q and cache c."""


def spec_fields(asked: Mapping[str, object]) -> dict[str, Any]:
    """Fields of `AttentionSpec` of a layer that calls the operators with the arguments `asked`."""
    values = {f.declared: asked.get(f.name) for f in FEATURES}
    if isinstance(tables := asked.get("blocksparse"), BlockTables):
        values["blocksparse"] = tables.block_size
    return values | {f.declared: values[f.declared] is not None for f in PER_HEAD}


@dataclasses.dataclass(frozen=True)
class Support:
    """What a backend can do. `attn_ops.testing` tests this, and that the rest is refused."""

    devices: tuple[str, ...]  # device types
    dtypes: tuple[torch.dtype, ...]  # of q and the cache
    head_sizes: tuple[int, ...] = ()  # empty: any
    block_sizes: tuple[int, ...] = ()  # empty: any
    sliding_window: bool = False
    soft_cap: bool = False
    cudagraph: AttentionCGSupport = AttentionCGSupport.NEVER
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    alibi: bool = False
    sinks: bool = False
    non_causal: bool = False
    non_causal_window: bool = True  # with `non_causal` and `sliding_window`: both at once
    lse: bool = False  # can write the log-sum-exp
    output_quant: tuple[str, ...] = ()  # schemes in which `forward` quantizes single tokens
    varlen_v_head_size: bool = False  # without a cache, values may have a head size of their own
    quantizes_query: bool = False  # with an FP8 cache q is rounded to FP8 too
    blocksparse: bool = False  # visits the blocks that a layout lists
    own_mask: bool = False  # rows see what the backend's own mask says; only taken by name
    latent: bool = False  # layers with latent attention (MLA), and no others
    latent_sizes: tuple[tuple[int, int], ...] = ()  # of `latent`: pairs Lkv, R; empty: any

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        """Why a layer of geometry `spec` cannot run here.

        In the form 'x must be ..., got ...; supported: ...'.
        """
        reasons = [*self._reasons_against_latent(spec)]
        for name, got, supported in (
            ("device", device.type, self.devices),
            ("dtype", spec.dtype, self.dtypes),
            ("head_size", spec.head_size, self.head_sizes or (spec.head_size,)),
            ("block_size", block_size, self.block_sizes or (block_size,)),
        ):
            if got not in supported:
                reasons.append(_unsupported(name, got, supported))
        reasons += [self._refusal(f, spec) for f in FEATURES if not f.per_head]
        if spec.kv_cache_dtype not in self.kv_cache_dtypes:
            reasons.append(
                _unsupported("kv_cache_dtype", spec.kv_cache_dtype, self.kv_cache_dtypes)
            )
        reasons += [self._refusal(f, spec) for f in PER_HEAD]
        chunk = spec.attention_chunk_size
        if chunk is not None and chunk % block_size:
            reasons.append(
                f"attention_chunk_size must be a multiple of block_size {block_size}, got {chunk}"
            )
        return [*filter(None, reasons), *self._reasons_against_causality(spec)]

    def _reasons_against_latent(self, spec: AttentionSpec) -> list[str]:
        if self.latent and spec.latent is None:
            return ["latent must be a LatentShape, got None; supported: latent attention alone"]
        if spec.latent is None:
            return []
        if not self.latent:
            return [f"latent must be None, got {spec.latent}; supported: None"]
        sizes = (spec.latent.kv_lora_rank, spec.latent.qk_rope_head_dim)
        if self.latent_sizes and sizes not in self.latent_sizes:
            names = "kv_lora_rank and qk_rope_head_dim"
            return [_unsupported(names, sizes, self.latent_sizes)]
        return []

    def _refusal(self, feature: Feature, spec: AttentionSpec) -> str | None:
        """Why the backend has not the feature that `spec` asks for; None where it is well."""
        asked = getattr(spec, feature.declared)
        if asked is None or asked is False or getattr(self, feature.declared):
            return None
        got = "a tensor" if feature.per_head else asked
        return f"{feature.name} must be None, got {got}; supported: None"

    def _reasons_against_causality(self, spec: AttentionSpec) -> list[str]:
        if spec.causal:
            return []
        if not self.non_causal:
            return ["causal must be True, got False; supported: True"]
        if spec.sliding_window is not None and not self.non_causal_window:
            return [
                f"sliding_window must be None without causal, got {spec.sliding_window}; "
                "supported: None"
            ]
        return []


def _unsupported(name: str, got: object, supported: tuple) -> str:
    names = ", ".join(map(_name, supported))
    return f"{name} must be supported, got {_name(got)}; supported: {names}"


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")
