"""`attn_ops::attention_quant`: attention whose output is quantized, in FP8 or NVFP4.

T tokens, N query heads, K kv heads, H head size, P physical blocks, B block size.
"""

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.block_layout.tables import layout_arguments
from attn_ops.metadata import METADATA_TYPE, AttentionMetadata
from attn_ops.metadata.features import SCHEMA
from attn_ops.ops import breaks
from attn_ops.ops.attention import TAGS, asked_of, attend, parts_of
from attn_ops.ops.breaks import AttentionCall
from attn_ops.ops.checks import check_causal, check_query, layer_of
from attn_ops.ops.library import LIBRARY, implements
from attn_ops.ops.merge import merged_and_quantized
from attn_ops.output_quant.quantize import quantize_output
from attn_ops.output_quant.schemes import (
    HOW_FIELDS,
    HOW_SCHEMA,
    OutputQuant,
    QuantizedOutput,
    known_output_quant,
)

LIBRARY.define(
    f"attention_quant(Tensor q, Tensor kv_cache, {METADATA_TYPE} meta, float scale, *, "
    f"{HOW_SCHEMA}, bool fuse=True, int[] decodes_apart=[], int[] prompts_apart=[], "
    f"{SCHEMA}, str kv_cache_dtype='auto', "
    "Tensor? k_scale=None, Tensor? v_scale=None, int? attention_chunk_size=None, "
    "bool? causal=None, bool logits_rows=False) -> (Tensor, Tensor)",
    tags=TAGS,
)


@implements("attention_quant")
def _attention_quant(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    out_scale: torch.Tensor | None = None,
    fuse: bool = True,
    decodes_apart: Sequence[int] = (),
    prompts_apart: Sequence[int] = (),
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    fields = {name: keywords.pop(name) for name in HOW_FIELDS if name in keywords}
    how = known_output_quant(**fields)
    check_query(q)
    how.check(q, out_scale)
    apart = (decodes_apart, prompts_apart) if fuse else _ALWAYS_APART
    return _attend_quant(
        q, kv_cache, meta, scale, how=how, out_scale=out_scale, apart=apart, **keywords
    )


_ALWAYS_APART = ((0,), (0,))


def _attend_quant(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    how: OutputQuant,
    out_scale: torch.Tensor | None,
    apart: tuple[Sequence[int], Sequence[int]],
    attention_chunk_size: int | None = None,
    causal: bool | None = None,
    logits_rows: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits_rows and meta.wants_no_logits(q.shape[0]):
        return quantize_output(q, how, out_scale)
    if breaks.hooks:
        more = {"attention_chunk_size": attention_chunk_size, "causal": causal} | options
        more |= {"logits_rows": logits_rows}
        run = functools.partial(_attend_quant, how=how, out_scale=out_scale, apart=apart)
        call = AttentionCall(run, q, kv_cache, meta, scale, more, how.empty)
        if (results := breaks.asked(call)) is not None:
            return results[0], results[1]
    asked = asked_of(scale, **options)
    if causal is not None:
        check_causal(meta, causal)
    if logits_rows:
        meta = meta.logits_rows(q.shape[0])
    layer = layer_of(q, kv_cache, meta, asked, attention_chunk_size)
    # A captured batch has its own rows and its kind, so it takes its own way.
    turns = apart[meta.common.max_query_len > 1]
    behind = turns and bisect.bisect_right(turns, q.shape[0]) % 2
    if behind or (how.group and not how.within_heads(q.shape[2])):
        return quantize_output(attend(layer, q, kv_cache, meta, asked), how, out_scale)
    if layer.cascade is not None:
        out1, lse1, out2, lse2 = parts_of(layer, q, kv_cache, asked)
        return merged_and_quantized(out1, lse1, out2, lse2, how, out_scale)
    computed_by = meta.backend if layer.part is None else layer.part.backend
    if how.scheme not in computed_by.support.output_quant:
        return quantize_output(attend(layer, q, kv_cache, meta, asked), how, out_scale)
    quant = QuantizedOutput(how, out_scale, *how.empty(q))
    asked = dataclasses.replace(asked, quant=quant)
    return layer.attend(q, kv_cache, meta, asked), quant.scales


@torch.library.register_fake("attn_ops::attention_quant", lib=LIBRARY)
def _attention_quant_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    scheme: str,
    column_major: bool = False,
    **keywords: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return OutputQuant(scheme, column_major=column_major).empty(q)


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
    """`attention`, its output quantized: by the backend's kernel, or by one of its own behind it.

    A backend quantizes in its kernel what its `Support.output_quant` names. Results are equal but
    for the last step of FP8 where the fused kernel's sum before rounding differs.

    Args:
        q, kv_cache, meta, scale: see `attention`.
        scheme: `fp8_static`, `fp8_group64`, `fp8_group128`, `fp8_row`, `fp8_tensor` or `nvfp4`.
        out_scale: one float32 on q's device: the scale of `fp8_static`; the global scale of
            `nvfp4`, None is 1. It is read on the device, so a new value counts at once.
        min_amax, min_scale: least amax and least scale of the dynamic FP8 schemes. With neither, a
            row of zeros has scale 0 and becomes NaN.
        round_scale: the scale is rounded to q's dtype, as torchao rounds it.
        round_values: x / scale is rounded to q's dtype before it becomes FP8.
        inverse_max: with the dynamic FP8 schemes: amax * (1 / 448) instead of amax / 448.
        inverse_scale: with the dynamic FP8 schemes: x * (1 / scale) instead of x / scale.
        multiply: with `fp8_static`: x * out_scale instead of x / out_scale.
        ue8m0: with groups: scales are rounded up to powers of two.
        column_major: with groups: scales have strides (1, T).
        fuse: True by default; False: always by a kernel of its own.
        decodes_apart, prompts_apart: ascending numbers of rows of q at which the kernel changes,
            for batches of single tokens and for others: a kernel of its own from the first on, the
            backend's again from the second on, and so on; the pass `quantize_output` measures them.
        options: the keywords from `min_amax` on, 0 and False by default, and the further ones of
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
    return torch.ops.attn_ops.attention_quant.default(
        q, kv_cache, meta, scale, scheme=scheme, out_scale=out_scale, **options, **layout
    )
