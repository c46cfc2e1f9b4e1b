"""`attn_ops::attention`: paged attention as a functional operator, and with the log-sum-exp.

T tokens, N query heads, K kv heads, H head size, P physical blocks, B block size.
"""

import dataclasses
import functools

import torch

from attn_ops.block_layout.tables import BlockTables, layout_arguments
from attn_ops.metadata import METADATA_TYPE, AttentionMetadata, AttentionOptions, Layer
from attn_ops.metadata.features import SCHEMA
from attn_ops.ops import breaks
from attn_ops.ops.breaks import AttentionCall
from attn_ops.ops.checks import check_causal, check_query, check_v_head_size, layer_of
from attn_ops.ops.library import LIBRARY, implements

ARGUMENTS = (
    f"Tensor q, Tensor kv_cache, {METADATA_TYPE} meta, float scale, *, "
    f"{SCHEMA}, str kv_cache_dtype='auto', Tensor? k_scale=None, Tensor? v_scale=None, "
    "int? attention_chunk_size=None, bool? causal=None, bool logits_rows=False"
)
# Host values of the metadata reach the kernels: Inductor's own graphs ("reduce-overhead") are cut
# around the operators. Ours are captured by contract, see docs/graphs.md.
TAGS = (torch.Tag.cudagraph_unsafe,)
LIBRARY.define(f"attention({ARGUMENTS}) -> Tensor", tags=TAGS)
LIBRARY.define(f"attention_with_lse({ARGUMENTS}) -> (Tensor, Tensor)", tags=TAGS)


@implements("attention")
def _attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    attention_chunk_size: int | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
    **options: object,
) -> torch.Tensor:
    if logits_rows and meta.wants_no_logits(q.shape[0]):
        return torch.empty_like(q)
    if breaks.hooks:
        more = {"attention_chunk_size": attention_chunk_size, "causal": causal} | options
        more |= {"logits_rows": logits_rows}
        call = AttentionCall(_attention, q, kv_cache, meta, scale, more, empty_out)
        if (results := breaks.asked(call)) is not None:
            return results[0]
    asked = asked_of(scale, **options) if options else _plain(scale)
    if causal is not None:
        check_causal(meta, causal)
    if logits_rows:
        meta = meta.logits_rows(q.shape[0])
    if options or type(meta) is not AttentionMetadata:
        layer = layer_of(q, kv_cache, meta, asked, attention_chunk_size)
    else:  # no tensor of its own has to be checked
        layer = meta.layer(q, kv_cache, asked, attention_chunk_size)
    if layer.direct:
        return meta.backend.forward(q, kv_cache, meta, asked)
    return attend(layer, q, kv_cache, meta, asked)


def asked_of(scale: float, **options: object) -> AttentionOptions:
    """What a layer asks for, by an operator's keywords."""
    return AttentionOptions(scale, **options, checked=True)  # pyright: ignore[reportArgumentType]


# Cached: once a layer, not once a call, 0.1 for 3.9 us (a CPU, 2026-11-22).
@functools.lru_cache(maxsize=128)
def _plain(scale: float) -> AttentionOptions:
    """Options of a layer that asks for nothing but its scale; made once, not once a call."""
    return AttentionOptions(scale, checked=True)


@torch.library.register_fake("attn_ops::attention", lib=LIBRARY)
def _attention_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **options: object,
) -> torch.Tensor:
    return q.new_empty(q.shape)


@implements("attention_with_lse")
def _attention_with_lse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    attention_chunk_size: int | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits_rows and meta.wants_no_logits(q.shape[0]):
        return torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if breaks.hooks:
        more = {"attention_chunk_size": attention_chunk_size, "causal": causal} | options
        more |= {"logits_rows": logits_rows}
        call = AttentionCall(_attention_with_lse, q, kv_cache, meta, scale, more, empty_states)
        if (results := breaks.asked(call)) is not None:
            return results[0], results[1]
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    asked = asked_of(scale, **options, lse=lse)
    if causal is not None:
        check_causal(meta, causal)
    if logits_rows:
        meta = meta.logits_rows(q.shape[0])
    layer = layer_of(q, kv_cache, meta, asked, attention_chunk_size)
    return attend(layer, q, kv_cache, meta, asked), lse


@torch.library.register_fake("attn_ops::attention_with_lse", lib=LIBRARY)
def _attention_with_lse_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def empty_out(q: torch.Tensor) -> tuple[torch.Tensor]:
    """Memory for [T, N, H] in q's dtype."""
    return (torch.empty(q.shape, dtype=q.dtype, device=q.device),)


def empty_states(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and [T, N] float32 for the log-sum-exp."""
    return *empty_out(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


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
    out, lse = torch.ops.attn_ops.merge_attn_states(*parts_of(layer, q, kv_cache, options))
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


def attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    attention_chunk_size: int | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
    v_head_size: int | None = None,
    blocksparse: BlockTables | None = None,
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
    plain = sliding_window is None and soft_cap is None and kv_cache_dtype == "auto"
    plain = plain and alibi_slopes is None and sinks is None and k_scale is None
    plain = plain and v_scale is None and attention_chunk_size is None and blocksparse is None
    if plain and causal is None and not logits_rows:
        # Half of what the call costs is the dispatcher's reading of keywords.
        out = torch.ops.attn_ops.attention.default(q, kv_cache, meta, scale)
    else:
        out = torch.ops.attn_ops.attention.default(
            q, kv_cache, meta, scale, sliding_window=sliding_window, soft_cap=soft_cap,
            alibi_slopes=alibi_slopes, sinks=sinks, kv_cache_dtype=kv_cache_dtype, k_scale=k_scale,
            v_scale=v_scale, attention_chunk_size=attention_chunk_size, causal=causal,
            logits_rows=logits_rows,
            **({} if blocksparse is None else layout_arguments(blocksparse)),
        )  # fmt: skip
    return out if v_head_size is None else _narrowed(out, v_head_size)


def attention_with_lse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    attention_chunk_size: int | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
    v_head_size: int | None = None,
    blocksparse: BlockTables | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention`, and the log of every softmax's denominator, for merging partial results.

    `attention` documents arguments and errors.

    Returns:
        [T, N, H], with `v_head_size` its first V columns, and [T, N] float32: log(sum(exp(score))),
        the sink included; -inf where a row sees no key and has no sink. Of padding rows, and of
        requests without any key (seq_len 0), it is -inf, with a sink too.
    """
    out, lse = torch.ops.attn_ops.attention_with_lse.default(
        q, kv_cache, meta, scale, sliding_window=sliding_window, soft_cap=soft_cap,
        alibi_slopes=alibi_slopes, sinks=sinks, kv_cache_dtype=kv_cache_dtype, k_scale=k_scale,
        v_scale=v_scale, attention_chunk_size=attention_chunk_size, causal=causal,
        logits_rows=logits_rows,
        **({} if blocksparse is None else layout_arguments(blocksparse)),
    )  # fmt: skip
    return out if v_head_size is None else _narrowed(out, v_head_size), lse


def _narrowed(out: torch.Tensor, v_head_size: int) -> torch.Tensor:
    """The columns of [T, N, H] that values have."""
    check_query(out)  # of q's shape; traced, the operator has not looked
    check_v_head_size(v_head_size, out.shape[2], "q")
    return out[..., :v_head_size]
