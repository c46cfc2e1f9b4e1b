"""`attn_ops::mla_attention_quant`: latent attention, its output quantized by a kernel after it.

No backend's kernel quantizes latent attention: no step was measured that gains by it.

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent.
"""

import functools
from typing import Any

import torch

from attn_ops.metadata import AttentionMetadata
from attn_ops.ops.attention import TAGS
from attn_ops.ops.breaks import LatentCall, attended
from attn_ops.ops.checks import check_query
from attn_ops.ops.library import operator
from attn_ops.ops.mla import DEFAULTS, KEYWORDS, attend_latent
from attn_ops.output_quant.quantize import quantize_output
from attn_ops.output_quant.schemes import HOW_SCHEMA, OutputQuant, how_of


def _like_out(q: torch.Tensor, v_head_dim: int) -> torch.Tensor:
    """A tensor of the output's shape [T, N, V], without its memory."""
    return q.new_empty(()).expand(*q.shape[:2], v_head_dim)


def _output(
    *call: Any, how: OutputQuant, out_scale: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_output(attend_latent(*call, **options)[0], how, out_scale)


@operator(
    fake=lambda q, *call, v_head_dim, scheme, **options: OutputQuant(scheme).empty(
        _like_out(q, v_head_dim)
    ),
    keywords=f"{HOW_SCHEMA}, {KEYWORDS}",
    tags=TAGS,
)
def mla_attention_quant(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    kv_b: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_attention`, its output quantized by a kernel after it.

    `attention_quant` documents the schemes, what may be given with them, and the results for an
    output [T, N, H], which is [T, N, V] here.

    Args:
        q, kv_cache, meta, kv_b, scale, v_head_dim: see `mla_attention`.
        scheme: `fp8_static`, `fp8_group64`, `fp8_group128`, `fp8_row`, `fp8_tensor` or `nvfp4`.
        out_scale: one float32 on q's device, of `fp8_static` and `nvfp4`.
        options: the scheme's further fields (`min_scale` to `ue8m0`), and the further keywords of
            `mla_attention`.

    Raises:
        ValueError: as both.
    """
    how, out_scale = how_of(options)
    check_query(q)
    how.check(_like_out(q, v_head_dim), out_scale)
    asked = {"kv_b": kv_b, "v_head_dim": v_head_dim} | DEFAULTS | options
    run = functools.partial(_output, how=how, out_scale=out_scale)
    out, scales = attended(LatentCall, run, q, kv_cache, meta, scale, asked, how.empty)
    return out, scales
