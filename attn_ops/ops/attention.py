"""`attn_ops::attention`: paged attention as a functional operator, and with the log-sum-exp.

T tokens, N query heads, K kv heads, H head size, P physical blocks, B block size.
"""

import dataclasses
import functools
from typing import Any, Unpack

import torch

from attn_ops.backends.checks import check_query
from attn_ops.block_layout.tables import layout_arguments
from attn_ops.metadata import AttentionMetadata, AttentionOptions, Layer
from attn_ops.metadata.features import SCHEMA, FeatureArguments
from attn_ops.ops.breaks import AttentionCall, attended
from attn_ops.ops.checks import check_v_head_size, layer_of, rows_of_layer
from attn_ops.ops.library import operator
from attn_ops.ops.merge import merged

KEYWORDS = (
    f"{SCHEMA}, str kv_cache_dtype='auto', Tensor? k_scale=None, Tensor? v_scale=None, "
    "int? attention_chunk_size=None, bool? causal=None, bool logits_rows=False"
)
# Host values of the metadata reach the kernels: Inductor's own graphs ("reduce-overhead") are cut
# around the operators. Ours are captured by contract, see docs/graphs.md.
TAGS = (torch.Tag.cudagraph_unsafe,)


class LayerArguments(FeatureArguments, total=False):
    """The keywords of `attention`, which documents them."""

    kv_cache_dtype: str
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    attention_chunk_size: int | None
    causal: bool | None
    logits_rows: bool
    v_head_size: int | None


# -- what is computed ------------------------------------------------------------------------------


def found(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    attention_chunk_size: int | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
    **options: Any,
) -> tuple[Layer, AttentionMetadata, AttentionOptions]:
    """What computes a layer, the batch as it sees it, and what it asks for."""
    meta = rows_of_layer(meta, q, causal, logits_rows)
    if not options:  # no tensor has to be checked
        asked = _plain(scale)
        return meta.layer(q, kv_cache, asked, attention_chunk_size), meta, asked
    asked = asked_of(scale, **options)
    return layer_of(q, kv_cache, meta, asked, attention_chunk_size), meta, asked


def asked_of(scale: float, **options: Any) -> AttentionOptions:
    """What a layer asks for, by an operator's keywords."""
    return AttentionOptions(scale, **options, checked=True)


# Cached: 0.1 for 3.9 us a call (a CPU, 2026-11-22).
@functools.lru_cache(maxsize=128)
def _plain(scale: float) -> AttentionOptions:
    """Options of a layer that asks for nothing but its scale."""
    return AttentionOptions(scale, checked=True)


def attend(
    layer: Layer,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """The backend's forward; over a shared prefix and the rest apart, if the batch was built so."""
    if layer.cascade is None:
        return layer.attend(q, kv_cache, meta, options)
    out, lse = merged(*parts_of(layer, q, kv_cache, options))
    if options.lse is not None:
        options.lse.copy_(lse)
    return out


def parts_of(
    layer: Layer, q: torch.Tensor, kv_cache: torch.Tensor, options: AttentionOptions
) -> list[torch.Tensor]:
    """Output and log-sum-exp over a shared prefix, and over the rest."""
    assert layer.cascade is not None, "the batch shares no prefix"
    parts = []
    for part, asked in zip(layer.cascade, (options.of_shared_prefix(), options), strict=True):
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        asked = dataclasses.replace(asked, lse=lse)
        parts += [part.layer(q, kv_cache, asked).attend(q, kv_cache, part, asked), lse]
    return parts


# -- operators -------------------------------------------------------------------------------------


def _output(
    q: torch.Tensor, kv_cache: torch.Tensor, *call: Any, **options: Any
) -> tuple[torch.Tensor]:
    layer, meta, asked = found(q, kv_cache, *call, **options)
    return (attend(layer, q, kv_cache, meta, asked),)


def _states(
    q: torch.Tensor, kv_cache: torch.Tensor, *call: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    layer, meta, asked = found(q, kv_cache, *call, **options, lse=lse)
    return attend(layer, q, kv_cache, meta, asked), lse


def _empty_output(q: torch.Tensor) -> tuple[torch.Tensor]:
    return (q.new_empty(q.shape),)


def _empty_states(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator(fake=lambda q, *call, **options: _empty_output(q)[0], keywords=KEYWORDS, tags=TAGS)
def _attention(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, scale: float, **options: Any
) -> torch.Tensor:
    return attended(AttentionCall, _output, q, kv_cache, meta, scale, options, _empty_output)[0]


@operator(fake=lambda q, *call, **options: _empty_states(q), keywords=KEYWORDS, tags=TAGS)
def _attention_with_lse(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, scale: float, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attended(AttentionCall, _states, q, kv_cache, meta, scale, options, _empty_states)
    return out, lse


def attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **asked: Unpack[LayerArguments],
) -> torch.Tensor:
    """Attention of the batch's query rows over the paged cache, by the backend that `meta` names.

    Args:
        q: [T, N, H]. Rows from `meta.common.num_actual_tokens` on are padding.
        kv_cache: [P, 2, B, K, H]; this step's keys and values are already written. q's dtype, or
            uint8 with an FP8 `kv_cache_dtype`.
        meta: the batch, from a backend's `AttentionMetadataBuilder`.
        scale: factor on q.k, usually H ** -0.5.
        sliding_window: keys a query sees, its own included; None sees all.
        soft_cap: c in c * tanh(s / c) on the scaled scores (Gemma 2), finite; None for none.
        alibi_slopes: [N] float32; scores are lowered by slope * |query - key| (arXiv:2108.12409).
        sinks: [N] float32 or q's dtype; a logit more in each head's softmax, of value 0 (GPT-OSS).
        kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2.
        k_scale, v_scale: [1] float32, positive; the cache holds value / scale. None is 1.
        attention_chunk_size: a query sees the keys of its own chunk of so many tokens (Llama 4);
            the builder must have had a spec with it. None sees all.
        causal: what `meta.common.causal` must be, which a compiled layer cannot look at; None: any.
        logits_rows: q holds only the rows whose logits are wanted, [R, N, H], see
            `AttentionMetadata.logits_rows`; what the pass `fast_prefill` writes.
        v_head_size: V of values that `write_kv` stored padded to H. None is H.
        blocksparse: which blocks of keys each block of queries sees; None sees all.

    Returns:
        [T, N, H], contiguous, in q's dtype; with `v_head_size` a view of its first V columns.
        Padding rows are zero.

    Raises:
        ValueError: shapes or devices do not fit, or the backend does not support the configuration.
    """
    if not asked:
        return _attention(q, kv_cache, meta, scale)
    v_head_size, options = _operands(asked)
    out = _attention(q, kv_cache, meta, scale, **options)
    return out if v_head_size is None else _narrowed(out, v_head_size)


def attention_with_lse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **asked: Unpack[LayerArguments],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention`, and the log of every softmax's denominator, for merging partial results.

    `attention` documents arguments and errors.

    Returns:
        [T, N, H], with `v_head_size` its first V columns, and [T, N] float32: log(sum(exp(score))),
        the sink included; -inf where a row sees no key and has no sink. Of padding rows, and of
        requests without any key (seq_len 0), it is -inf, with a sink too.
    """
    v_head_size, options = _operands(asked)
    out, lse = _attention_with_lse(q, kv_cache, meta, scale, **options)
    return out if v_head_size is None else _narrowed(out, v_head_size), lse


def _operands(asked: Any) -> tuple[int | None, dict[str, Any]]:
    """`v_head_size`, and the keywords of the operator that are given."""
    # Half of what a call costs is the dispatcher's reading of keywords.
    options = {name: value for name, value in asked.items() if value is not None}
    v_head_size, layout = options.pop("v_head_size", None), options.pop("blocksparse", None)
    return v_head_size, options if layout is None else options | layout_arguments(layout)


def _narrowed(out: torch.Tensor, v_head_size: int) -> torch.Tensor:
    """The columns of [T, N, H] that values have."""
    check_query(out)  # of q's shape; traced, the operator has not looked
    check_v_head_size(v_head_size, out.shape[2], "q")
    return out[..., :v_head_size]
