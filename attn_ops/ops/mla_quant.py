"""`attn_ops::mla_attention_quant`: latent attention, its output quantized by a kernel after it.

No backend's kernel quantizes latent attention: no step was measured that gains by it.

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent.
"""

import functools
from typing import Any

import torch

from attn_ops.metadata import AttentionMetadata, LatentOptions
from attn_ops.ops import breaks
from attn_ops.ops.attention import TAGS
from attn_ops.ops.checks import check_query
from attn_ops.ops.library import LIBRARY, implements
from attn_ops.ops.mla import ARGUMENTS, OPTIONS, LatentCall, empty_out, latent_layer_of
from attn_ops.output_quant.quantize import quantize_output
from attn_ops.output_quant.schemes import (
    HOW_FIELDS,
    HOW_SCHEMA,
    OutputQuant,
    known_output_quant,
)

LIBRARY.define(
    f"mla_attention_quant({ARGUMENTS}, {HOW_SCHEMA}, {OPTIONS}) -> (Tensor, Tensor)", tags=TAGS
)


@implements("mla_attention_quant")
def _mla_attention_quant(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    out_scale: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    fields = {name: keywords.pop(name) for name in HOW_FIELDS if name in keywords}
    how = known_output_quant(**fields)
    check_query(q)
    how.check(_like_out(q, v_head_dim), out_scale)
    asked = {"kv_b": kv_b, "v_head_dim": v_head_dim} | _DEFAULTS | keywords
    if asked["logits_rows"] and meta.wants_no_logits(q.shape[0]):
        return quantize_output(empty_out(q, v_head_dim), how, out_scale)
    run = functools.partial(_attend_quant, how=how, out_scale=out_scale)
    if breaks.hooks:
        call = LatentCall(run, q, kv_cache, meta, scale, asked, how.empty)
        if (results := breaks.asked(call)) is not None:
            return results[0], results[1]
    return run(q, kv_cache, meta, scale, **asked)


_DEFAULTS = {"kv_cache_dtype": "auto", "kv_scale": None, "causal": None, "logits_rows": False}
"""The schema's defaults: the dispatcher leaves out arguments that have them."""


def _like_out(q: torch.Tensor, v_head_dim: int) -> torch.Tensor:
    """A tensor of the output's shape [T, N, V], without its memory."""
    return q.new_empty(()).expand(*q.shape[:2], v_head_dim)


def _attend_quant(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    how: OutputQuant,
    out_scale: torch.Tensor | None,
    kv_b: torch.Tensor,
    v_head_dim: int,
    kv_cache_dtype: str,
    kv_scale: torch.Tensor | None,
    causal: bool | None,
    logits_rows: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    asked = LatentOptions(scale, kv_b, v_head_dim, kv_cache_dtype, kv_scale)
    meta, layer = latent_layer_of(q, kv_cache, meta, asked, causal, logits_rows)
    return quantize_output(layer.attend(q, kv_cache, meta, asked), how, out_scale)


@torch.library.register_fake("attn_ops::mla_attention_quant", lib=LIBRARY)
def _mla_attention_quant_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    scheme: str,
    **keywords: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return OutputQuant(scheme).empty(_like_out(q, v_head_dim))


def mla_attention_quant(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    scheme: str,
    out_scale: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_attention`, its output quantized by a kernel after it.

    `attention_quant` documents the schemes, what may be given with them, and the results for an
    output [T, N, H], which is [T, N, V] here.

    Args:
        q, kv_cache, meta, kv_b, scale, v_head_dim: see `mla_attention`.
        scheme: `fp8_static`, `fp8_group64`, `fp8_group128`, `fp8_row`, `fp8_tensor` or `nvfp4`.
        out_scale: one float32 on q's device, of `fp8_static` and `nvfp4`.
        keywords: the scheme's further fields (`min_scale` to `ue8m0`), and the further keywords of
            `mla_attention`.

    Raises:
        ValueError: as both.
    """
    return torch.ops.attn_ops.mla_attention_quant.default(
        q, kv_cache, meta, kv_b, scale, v_head_dim=v_head_dim, scheme=scheme, out_scale=out_scale,
        **keywords,
    )  # fmt: skip
