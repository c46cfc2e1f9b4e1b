"""The forward of every backend of latent attention: rows by their way, absorbed or up-projected.

T tokens, D rows of the decode way, N query heads, P head size without RoPE, R with RoPE, V head
size of values, Lkv latent, P blocks, B block size.
"""

import dataclasses

import torch

from attn_ops.backends.mla.builder import Chunk, DecodePart, MLAPlan, PrefillPart, all_decode
from attn_ops.backends.mla.gather import gather_latents
from attn_ops.backends.mla.kernels import MLAKernels
from attn_ops.backends.mla.quantized import by_rows, merge_into, of_rows, quantize_into
from attn_ops.metadata import AttentionMetadata, AttentionSpec, LatentOptions, kv_dtype_of
from attn_ops.output_quant.schemes import QuantizedOutput


def plan_of(meta: AttentionMetadata, spec: AttentionSpec) -> MLAPlan:
    """What the builder planned for layers of that geometry; metadata made by hand has none."""
    planned = meta.planned(spec)
    return all_decode(meta.common) if planned is None else planned


def mla_forward(
    kernels: MLAKernels,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: LatentOptions,
    plan: MLAPlan | None = None,
) -> torch.Tensor:
    """q [T, N, P + R], kv_cache [P, B, Lkv + R] -> [T, N, V]; writes `options.lse` and `.quant`."""
    plan = all_decode(meta.common) if plan is None else plan
    if plan.prefill is None:
        assert plan.decode is not None, "a batch without prefills is all decodes"
        return _decode_way(kernels, q, kv_cache, plan.decode, options)
    if options.lse is not None:
        options.lse[plan.num_rows :].fill_(float("-inf"))
    if options.quant is not None and _is_sliced(plan) and by_rows(options.quant.how):
        return _both_quantized(kernels, q, kv_cache, plan, options, options.quant)
    if plan.prefill.rows == slice(0, q.shape[0]) and options.quant is None:
        out, lse = _prefill_way(kernels, q, kv_cache, plan.prefill, options)
        if options.lse is not None:
            assert lse is not None, "it is asked for"
            options.lse.copy_(lse)
        return out
    out = q.new_empty(*q.shape[:2], options.v_head_dim)
    out[plan.num_rows :].zero_()
    if plan.decode is not None:
        rows, asked = plan.decode.rows, _of_part(options, plan.decode.rows)
        out[rows] = _decode_way(kernels, q[rows], kv_cache, plan.decode, asked)
        if asked.lse is not None and isinstance(rows, torch.Tensor):  # a copy, not a view
            options.lse[rows] = asked.lse  # pyright: ignore[reportOptionalSubscript]
    rows = plan.prefill.rows
    asked = _of_part(options, rows)
    result, lse = _prefill_way(kernels, q[rows], kv_cache, plan.prefill, asked)
    out[rows] = result
    if options.lse is not None:
        assert lse is not None, "it is asked for"
        options.lse[rows] = lse.to(options.lse.dtype)
    return out if options.quant is None else quantize_into(out, options.quant)


def _is_sliced(plan: MLAPlan) -> bool:
    """Whether the rows of each way are neighbours."""
    parts = [part for part in (plan.decode, plan.prefill) if part is not None]
    return all(isinstance(part.rows, slice) for part in parts)


def _both_quantized(
    kernels: MLAKernels,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: MLAPlan,
    options: LatentOptions,
    quant: QuantizedOutput,
) -> torch.Tensor:
    """Each way writes its own rows of `quant`, from its last kernel."""
    padding = slice(plan.num_rows, None)
    zeros = q.new_zeros(q.shape[0] - plan.num_rows, q.shape[1], options.v_head_dim)
    quantize_into(zeros, of_rows(quant, padding))
    if plan.decode is not None:
        rows = plan.decode.rows
        asked = _of_part(options, rows, of_rows(quant, rows))  # pyright: ignore[reportArgumentType]
        _decode_way(kernels, q[rows], kv_cache, plan.decode, asked)
    assert plan.prefill is not None, "else all are decodes"
    rows = plan.prefill.rows
    asked = _of_part(options, rows, of_rows(quant, rows))  # pyright: ignore[reportArgumentType]
    _, lse = _prefill_way(kernels, q[rows], kv_cache, plan.prefill, asked)
    if options.lse is not None:
        assert lse is not None, "it is asked for"
        options.lse[rows] = lse.to(options.lse.dtype)
    return quant.out


def _of_part(
    options: LatentOptions, rows: slice | torch.Tensor, quant: QuantizedOutput | None = None
) -> LatentOptions:
    """What a layer asks of a part of the rows; without `quant` they are quantized later."""
    lse = None if options.lse is None else options.lse[rows]
    return dataclasses.replace(options, lse=lse, quant=quant)


# -- the decode way --------------------------------------------------------------------------------


def _decode_way(
    kernels: MLAKernels,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    part: DecodePart,
    options: LatentOptions,
) -> torch.Tensor:
    """MQA over the latents, q absorbed through W_UK, the result through W_UV: [D, N, V]."""
    num_heads = q.shape[1]
    w_uk_NPL, w_uv_NVL = options.w_uk(num_heads), options.w_uv(num_heads)
    q_nope_DNP, q_pe_DNR = q.tensor_split((w_uk_NPL.shape[1],), dim=2)
    if kernels.absorb is None:
        ql_DNL = torch.bmm(q_nope_DNP.transpose(0, 1), w_uk_NPL).transpose(0, 1)
    else:
        ql_DNL = kernels.absorb(q_nope_DNP, w_uk_NPL)
    asked = {
        "scale": options.scale,
        "kv_cache_dtype": options.kv_cache_dtype,
        "kv_scale": options.kv_scale,
        "lse": options.lse,
        "plan": part.plan,
    }
    if kernels.decode_project is not None:
        return kernels.decode_project(
            ql_DNL, q_pe_DNR, kv_cache, part.common, w_uv_NVL, quant=options.quant, **asked
        )
    o_DNL = kernels.decode(ql_DNL, q_pe_DNR, kv_cache, part.common, **asked)
    out_DNV = q.new_empty(*q.shape[:2], options.v_head_dim)
    torch.bmm(o_DNL.transpose(0, 1), w_uv_NVL.mT, out=out_DNV.transpose(0, 1))
    return out_DNV if options.quant is None else quantize_into(out_DNV, options.quant)


# -- the prefill way -------------------------------------------------------------------------------


def _prefill_way(
    kernels: MLAKernels,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    part: PrefillPart,
    options: LatentOptions,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """MHA over up-projected keys and values, chunk by chunk: [T, N, V], and lse [T, N]."""
    with_lse = options.lse is not None or any(chunk.merges for chunk in part.chunks)
    out, lse = q.new_empty(0), None
    for chunk in part.chunks:
        k_KNH, v_KNV = up_projected(kv_cache, chunk, part, options, q.shape[1])
        new, new_lse = kernels.prefill(
            q[chunk.rows], k_KNH, v_KNV, chunk.cu_rows, chunk.cu_keys, chunk.max_rows,
            chunk.max_keys, scale=options.scale, causal=chunk.causal, with_lse=with_lse,
        )  # fmt: skip
        del k_KNH, v_KNV  # the next chunk's take their place
        if options.quant is None and len(part.chunks) == 1:
            return new, new_lse
        if chunk is part.chunks[0]:
            out = q.new_empty(*q.shape[:2], options.v_head_dim)
            lse = None if new_lse is None else new_lse.new_empty(q.shape[:2])
        for rows, of_new, quant in _ranges(chunk, options.quant):
            part_lse = None if new_lse is None else new_lse[of_new]
            _add(out, lse, rows, new[of_new], part_lse, quant, merges=not chunk.causal)
    return out, lse


def _ranges(
    chunk: Chunk, quant: QuantizedOutput | None
) -> list[tuple[slice, slice, QuantizedOutput | None]]:
    """Rows of a part, the same of the chunk, and where they are quantized: the rest goes on."""
    first, last = chunk.rows.start, chunk.rows.stop
    if quant is None:
        return [(chunk.rows, slice(None), None)]
    done = slice(first, first + chunk.num_done)
    return [
        (done, slice(0, chunk.num_done), of_rows(quant, done)),
        (slice(done.stop, last), slice(chunk.num_done, None), None),
    ]


def _add(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    rows: slice,
    new: torch.Tensor,
    new_lse: torch.Tensor | None,
    quant: QuantizedOutput | None,
    *,
    merges: bool,
) -> None:
    """Take a chunk's result into `out` and `lse`, or into `quant`: as it is, or merged."""
    if not new.shape[0]:
        return
    if merges:
        assert lse is not None, "it is asked for where rows see several chunks"
        assert new_lse is not None, "the same"
        states = (out[rows], lse[rows], new, new_lse)
        if quant is not None:
            lse[rows] = merge_into(*states, quant)
            return
        new, new_lse = torch.ops.attn_ops.merge_attn_states(*states)
    if quant is None:
        out[rows] = new
    else:
        quantize_into(new, quant)
    if lse is not None:
        assert new_lse is not None, "the same"
        lse[rows] = new_lse


def up_projected(
    kv_cache: torch.Tensor,
    chunk: Chunk,
    part: PrefillPart,
    options: LatentOptions,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [K, N, P + R] and values [K, N, V] of a chunk, contiguous."""
    latent_KL = part.workspace.rows(chunk.num_keys, kv_cache.shape[2])
    gather_latents(
        kv_cache, chunk.block_table, chunk.cu_keys, chunk.starts, latent_KL,
        kv_scale=options.kv_scale, fp8=kv_dtype_of(options.kv_cache_dtype),
    )  # fmt: skip
    w_uk_NPL, w_uv_NVL = options.w_uk(num_heads), options.w_uv(num_heads)
    _, num_nope, rank = w_uk_NPL.shape
    c_KL, k_pe_KR = latent_KL[:, :rank], latent_KL[:, rank:]
    k = latent_KL.new_empty(chunk.num_keys, num_heads, num_nope + k_pe_KR.shape[1])
    v = latent_KL.new_empty(chunk.num_keys, num_heads, options.v_head_dim)
    # Each product is written where it belongs: a `cat` behind one would copy all keys.
    c_NKL = c_KL.expand(num_heads, -1, -1)
    torch.bmm(c_NKL, w_uk_NPL.mT, out=k[..., :num_nope].transpose(0, 1))
    torch.bmm(c_NKL, w_uv_NVL.mT, out=v.transpose(0, 1))
    k[..., num_nope:] = k_pe_KR.unsqueeze(1)
    return k, v
