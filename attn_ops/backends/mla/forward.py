"""The forward of every backend of latent attention: rows by their way, absorbed or up-projected.

T tokens, D rows of the decode way, N query heads, P head size without RoPE, R with RoPE, V head
size of values, Lkv latent, P blocks, B block size.
"""

import dataclasses

import torch

from attn_ops.backends.mla.builder import Chunk, DecodePart, MLAPlan, PrefillPart, all_decode
from attn_ops.backends.mla.gather import gather_latents
from attn_ops.backends.mla.kernels import MLAKernels
from attn_ops.metadata import AttentionMetadata, AttentionSpec, LatentOptions, kv_dtype_of


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
    """q [T, N, P + R], kv_cache [P, B, Lkv + R] -> [T, N, V]; writes `options.lse`."""
    plan = all_decode(meta.common) if plan is None else plan
    if plan.prefill is None:
        assert plan.decode is not None, "a batch without prefills is all decodes"
        return _decode_way(kernels, q, kv_cache, plan.decode, options)
    if options.lse is not None:
        options.lse[plan.num_rows :].fill_(float("-inf"))
    if plan.prefill.rows == slice(0, q.shape[0]):
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
    return out


def _of_part(options: LatentOptions, rows: slice | torch.Tensor) -> LatentOptions:
    """The options for a part of the rows."""
    lse = None if options.lse is None else options.lse[rows]
    return dataclasses.replace(options, lse=lse)


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
        return kernels.decode_project(ql_DNL, q_pe_DNR, kv_cache, part.common, w_uv_NVL, **asked)
    o_DNL = kernels.decode(ql_DNL, q_pe_DNR, kv_cache, part.common, **asked)
    out_DNV = q.new_empty(*q.shape[:2], options.v_head_dim)
    torch.bmm(o_DNL.transpose(0, 1), w_uv_NVL.mT, out=out_DNV.transpose(0, 1))
    return out_DNV


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
        if len(part.chunks) == 1:
            return new, new_lse
        if chunk is part.chunks[0]:
            out = q.new_empty(*q.shape[:2], options.v_head_dim)
            lse = None if new_lse is None else new_lse.new_empty(q.shape[:2])
        rows = chunk.rows
        if not chunk.causal:
            assert lse is not None, "it is asked for where rows see several chunks"
            new, new_lse = torch.ops.attn_ops.merge_attn_states(out[rows], lse[rows], new, new_lse)
        out[rows] = new
        if lse is not None and new_lse is not None:
            lse[rows] = new_lse
    return out, lse


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
