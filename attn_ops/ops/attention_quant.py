"""`attn_ops::attention_quant`: attention whose output is quantized, in FP8 or NVFP4.

T tokens, N query heads, K kv heads, H head size, P physical blocks, B block size.
"""

import dataclasses
import functools
from typing import Any

import torch

from attn_ops.block_layout.tables import layout_arguments
from attn_ops.metadata import AttentionMetadata, Layer
from attn_ops.ops.attention import KEYWORDS, TAGS, attend, found
from attn_ops.ops.breaks import AttentionCall, attended
from attn_ops.ops.checks import check_query
from attn_ops.ops.library import operator
from attn_ops.output_quant.quantize import quantize_output
from attn_ops.output_quant.schemes import (
    HOW_SCHEMA,
    OutputQuant,
    QuantizedOutput,
    how_of,
)


def _output(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *call: Any,
    how: OutputQuant,
    out_scale: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    layer, meta, asked = found(q, kv_cache, *call, **options)
    if not _is_fused(layer, meta, how, q.shape[2]):
        return quantize_output(attend(layer, q, kv_cache, meta, asked), how, out_scale)
    quant = QuantizedOutput(how, out_scale, *how.empty(q))
    asked = dataclasses.replace(asked, quant=quant)
    return layer.attend(q, kv_cache, meta, asked), quant.scales


def _is_fused(layer: Layer, meta: AttentionMetadata, how: OutputQuant, head_size: int) -> bool:
    """Whether the backend's kernel quantizes: single tokens without a shared prefix."""
    backend = meta.backend if layer.part is None else layer.part.backend
    cut = how.group is not None and head_size % how.group != 0  # a group lies in several heads
    single = meta.common.max_query_len <= 1 and layer.cascade is None
    return single and not cut and how.scheme in backend.support.output_quant


@operator(
    fake=lambda q, *call, scheme, **options: OutputQuant(scheme).empty(q),
    keywords=f"{HOW_SCHEMA}, {KEYWORDS}",
    tags=TAGS,
)
def _attention_quant(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, scale: float, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    how, out_scale = how_of(options)
    check_query(q)
    how.check(q, out_scale)
    run = functools.partial(_output, how=how, out_scale=out_scale)
    out, scales = attended(AttentionCall, run, q, kv_cache, meta, scale, options, how.empty)
    return out, scales


def attention_quant(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    scheme: str,
    out_scale: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention`, its output quantized: in the backend's kernel, or by a kernel after it.

    A backend quantizes in its kernel for single tokens, the schemes that its `Support.output_quant`
    names. Results are equal but for the last step of FP8, where the kernel's sum rounds otherwise.

    Args:
        q, kv_cache, meta, scale: see `attention`.
        scheme: `fp8_static`, `fp8_group64`, `fp8_group128`, `fp8_row`, `fp8_tensor` or `nvfp4`.
        out_scale: one float32 on q's device: the scale of `fp8_static`; the global scale of
            `nvfp4`, None is 1. It is read on the device, so a new value counts at once.
        min_scale: least scale of the dynamic FP8 schemes. With 0, a row of zeros has scale 0 and
            becomes NaN.
        round_scale: the scale is rounded to q's dtype, as torchao rounds it.
        round_values: x / scale is rounded to q's dtype before it becomes FP8.
        multiply: multiply instead of divide: x * out_scale with `fp8_static`, x * (1 / scale) with
            the dynamic FP8 schemes.
        ue8m0: with groups: scales are rounded up to powers of two.
        options: the keywords from `min_scale` on, 0 and False by default, and the further ones of
            `attention`, but for `v_head_size`.

    Returns:
        The output [T, N, H] float8_e4m3fn, for `nvfp4` [T, N, H / 2] uint8, the even value in the
        low half. And float32 scales, by which an output is multiplied to mean attention's: [T, 1]
        by row, [T, N * H / group] by group, [1] for `fp8_tensor`, none ([0]) for `fp8_static`. For
        `nvfp4` float8_e4m3fn in cuBLAS's order of tiles [128, 4], T and N * H / 16 rounded up to
        them with zeros.

    Raises:
        ValueError: the scheme is unknown or does not take an option, `out_scale` is missing or does
            not fit, N * H is no multiple of the group; and as `attention`.
    """
    layout = layout_arguments(options.pop("blocksparse", None))
    # Only what is given: each keyword costs torch some tenths of a microsecond.
    return _attention_quant(
        q, kv_cache, meta, scale, scheme=scheme, out_scale=out_scale, **options, **layout
    )
