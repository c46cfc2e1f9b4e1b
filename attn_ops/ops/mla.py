"""`attn_ops::mla_attention`: latent attention (MLA) over the paged cache, as `attention` is.

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent,
P physical blocks, B block size.
"""

from typing import Any

import torch

from attn_ops.metadata import AttentionMetadata, LatentOptions
from attn_ops.ops.attention import TAGS
from attn_ops.ops.breaks import LatentCall, attended
from attn_ops.ops.checks import check_vector, rows_of_layer
from attn_ops.ops.library import operator

KEYWORDS = (
    "str kv_cache_dtype='auto', Tensor? kv_scale=None, bool? causal=None, bool logits_rows=False"
)
DEFAULTS = {"kv_cache_dtype": "auto", "kv_scale": None, "causal": None, "logits_rows": False}


@operator(fake=lambda q, *call, v_head_dim, **options: empty_out(q, v_head_dim), tags=TAGS)
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
    options = _keywords(kv_b, v_head_dim, kv_cache_dtype, kv_scale, causal, logits_rows)
    return attended(
        LatentCall, attend_latent, q, kv_cache, meta, scale, options, lambda out: (out,)
    )[0]


@operator(
    fake=lambda q, *call, v_head_dim, **options: _with_lse(empty_out(q, v_head_dim)), tags=TAGS
)
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
    options = _keywords(kv_b, v_head_dim, kv_cache_dtype, kv_scale, causal, logits_rows)
    out, lse = attended(LatentCall, _states, q, kv_cache, meta, scale, options, _with_lse)
    return out, lse


def _keywords(*values: Any) -> dict[str, Any]:
    names = ("kv_b", "v_head_dim", "kv_cache_dtype", "kv_scale", "causal", "logits_rows")
    return dict(zip(names, values, strict=True))


def attend_latent(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    causal: bool | None,
    logits_rows: bool,
    **options: Any,
) -> tuple[torch.Tensor]:
    """The output alone, as operators return it."""
    meta = rows_of_layer(meta, q, causal, logits_rows)
    asked = LatentOptions(scale, **options)
    check_vector("kv_scale", asked.kv_scale, 1, q.device)
    return (meta.latent_layer(q, kv_cache, asked).attend(q, kv_cache, meta, asked),)


def _states(q: torch.Tensor, *call: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return attend_latent(q, *call, **options, lse=lse)[0], lse


def empty_out(q: torch.Tensor, v_head_dim: int) -> torch.Tensor:
    """Memory for [T, N, V] in q's dtype."""
    return q.new_empty(q.shape[0], q.shape[1], v_head_dim)


def _with_lse(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [T, N, V], and memory for the log-sum-exp [T, N]."""
    return out, out.new_empty(out.shape[:2], dtype=torch.float32)
