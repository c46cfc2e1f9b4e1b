"""`attn_ops::mla_attention`: latent attention (MLA) over the paged cache, as `attention` is.

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent,
P physical blocks, B block size.
"""

import dataclasses
from typing import Any

import torch

from attn_ops.backends.checks import latent_spec
from attn_ops.metadata import (
    METADATA_TYPE,
    AttentionMetadata,
    AttentionSpec,
    LatentOptions,
    Layer,
)
from attn_ops.ops import breaks
from attn_ops.ops.attention import TAGS
from attn_ops.ops.breaks import AttentionCall
from attn_ops.ops.checks import check_causal, check_metadata, check_vector
from attn_ops.ops.library import LIBRARY, implements

ARGUMENTS = (
    f"Tensor q, Tensor kv_cache, {METADATA_TYPE} meta, Tensor kv_b, float scale, *, int v_head_dim"
)
OPTIONS = (
    "str kv_cache_dtype='auto', Tensor? kv_scale=None, bool? causal=None, bool logits_rows=False"
)
LIBRARY.define(f"mla_attention({ARGUMENTS}, {OPTIONS}) -> Tensor", tags=TAGS)
LIBRARY.define(f"mla_attention_with_lse({ARGUMENTS}, {OPTIONS}) -> (Tensor, Tensor)", tags=TAGS)


@dataclasses.dataclass(frozen=True, eq=False)
class LatentCall(AttentionCall):
    """A call of latent attention: `kv_b` and `v_head_dim` are among the options."""

    @property
    def spec(self) -> AttentionSpec:
        o = self.options
        asked = LatentOptions(self.scale, o["kv_b"], o["v_head_dim"], o["kv_cache_dtype"])
        causal = self.meta.common.causal if o["causal"] is None else o["causal"]
        return latent_spec(self.q, self.kv_cache, asked, causal)

    def empty_results(self) -> tuple[torch.Tensor, ...]:
        return self.empty(empty_out(self.q, self.options["v_head_dim"]))


@implements("mla_attention")
def _mla_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    kv_cache_dtype: str = "auto",
    kv_scale: torch.Tensor | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
) -> torch.Tensor:
    if logits_rows and meta.wants_no_logits(q.shape[0]):
        return empty_out(q, v_head_dim)
    if breaks.hooks:
        more = _keywords(kv_b, v_head_dim, kv_cache_dtype, kv_scale, causal, logits_rows)
        call = LatentCall(_run, q, kv_cache, meta, scale, more, lambda out: (out,))
        if (results := breaks.asked(call)) is not None:
            return results[0]
    asked = LatentOptions(scale, kv_b, v_head_dim, kv_cache_dtype, kv_scale)
    meta, layer = latent_layer_of(q, kv_cache, meta, asked, causal, logits_rows)
    return layer.attend(q, kv_cache, meta, asked)


@torch.library.register_fake("attn_ops::mla_attention", lib=LIBRARY)
def _mla_attention_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    **options: object,
) -> torch.Tensor:
    return empty_out(q, v_head_dim)


@implements("mla_attention_with_lse")
def _mla_attention_with_lse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    kv_cache_dtype: str = "auto",
    kv_scale: torch.Tensor | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits_rows and meta.wants_no_logits(q.shape[0]):
        return _with_lse(empty_out(q, v_head_dim))
    if breaks.hooks:
        more = _keywords(kv_b, v_head_dim, kv_cache_dtype, kv_scale, causal, logits_rows)
        call = LatentCall(_run_with_lse, q, kv_cache, meta, scale, more, _with_lse)
        if (results := breaks.asked(call)) is not None:
            return results[0], results[1]
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    asked = LatentOptions(scale, kv_b, v_head_dim, kv_cache_dtype, kv_scale, lse)
    meta, layer = latent_layer_of(q, kv_cache, meta, asked, causal, logits_rows)
    return layer.attend(q, kv_cache, meta, asked), lse


@torch.library.register_fake("attn_ops::mla_attention_with_lse", lib=LIBRARY)
def _mla_attention_with_lse_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_lse(empty_out(q, v_head_dim))


def _keywords(*values: Any) -> dict[str, Any]:
    names = ("kv_b", "v_head_dim", "kv_cache_dtype", "kv_scale", "causal", "logits_rows")
    return dict(zip(names, values, strict=True))


def _run(q: torch.Tensor, *arguments: Any, kv_b: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """`_mla_attention`, its arguments in the order of an `AttentionCall`."""
    kv_cache, meta, scale = arguments
    return _mla_attention(q, kv_cache, meta, kv_b, scale, **keywords)


def _run_with_lse(
    q: torch.Tensor, *arguments: Any, kv_b: torch.Tensor, **keywords: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    kv_cache, meta, scale = arguments
    return _mla_attention_with_lse(q, kv_cache, meta, kv_b, scale, **keywords)


def empty_out(q: torch.Tensor, v_head_dim: int) -> torch.Tensor:
    """Memory for [T, N, V] in q's dtype."""
    return q.new_empty(q.shape[0], q.shape[1], v_head_dim)


def _with_lse(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and [T, N] float32 for the log-sum-exp."""
    return out, out.new_empty(out.shape[:2], dtype=torch.float32)


def latent_layer_of(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    asked: LatentOptions,
    causal: bool | None,
    logits_rows: bool,
) -> tuple[AttentionMetadata, Layer]:
    """The metadata of the rows that the layer sees, and what computes the call."""
    check_metadata(meta)
    if causal is not None:
        check_causal(meta, causal)
    if logits_rows:
        meta = meta.logits_rows(q.shape[0])
    if asked.kv_scale is not None:
        check_vector("kv_scale", asked.kv_scale, 1, q.device)
    return meta, meta.latent_layer(q, kv_cache, asked)


def mla_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    kv_cache_dtype: str = "auto",
    kv_scale: torch.Tensor | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
) -> torch.Tensor:
    """Latent attention of the batch's query rows, by the backend that `meta` names.

    The cache holds this step's latents already (`write_mla_kv`). Which of the two algorithms a
    request takes depends on its lengths (docs/backends.md).

    Args:
        q: [T, N, P + R]; the last R columns went through RoPE. Rows from
            `meta.common.num_actual_tokens` on are padding.
        kv_cache: [P, B, Lkv + R], q's dtype, or uint8 with an FP8 `kv_cache_dtype`.
        meta: the batch, from the `AttentionMetadataBuilder` of a backend of latent attention.
        kv_b: [N * (P + V), Lkv] in q's dtype: the weight of `kv_b_proj`, by head P rows for the key
            and V for the value. It is read as it is: new values count at once.
        scale: factor on q.k, usually (P + R) ** -0.5, with YaRN times its factor.
        v_head_dim: V.
        kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2.
        kv_scale: [1] float32, positive; the cache holds value / scale. None is 1.
        causal: what `meta.common.causal` must be; None: any that the backend takes.
        logits_rows: q holds only the rows whose logits are wanted, as in `attention`.

    Returns:
        [T, N, V], contiguous, in q's dtype. Padding rows are zero.

    Raises:
        ValueError: shapes or devices do not fit, or the backend does not support the configuration.
    """
    return torch.ops.attn_ops.mla_attention.default(
        q, kv_cache, meta, kv_b, scale, v_head_dim=v_head_dim, kv_cache_dtype=kv_cache_dtype,
        kv_scale=kv_scale, causal=causal, logits_rows=logits_rows,
    )  # fmt: skip


def mla_attention_with_lse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    kv_cache_dtype: str = "auto",
    kv_scale: torch.Tensor | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_attention`, and the log of every softmax's denominator, for merging partial results.

    `mla_attention` documents arguments and errors.

    Returns:
        [T, N, V], and [T, N] float32: log(sum(exp(score))); -inf of padding rows and of requests
        without any key.
    """
    return torch.ops.attn_ops.mla_attention_with_lse.default(
        q, kv_cache, meta, kv_b, scale, v_head_dim=v_head_dim, kv_cache_dtype=kv_cache_dtype,
        kv_scale=kv_scale, causal=causal, logits_rows=logits_rows,
    )  # fmt: skip
