"""TORCH_MLA: latent attention in plain PyTorch; its reference is every latent backend's oracle.

| devices | dtypes | sizes | block sizes | KV cache | CUDA graph |
|---|---|---|---|---|---|
| any | float64, float32, float16, bfloat16 | any | any | any | never: reads CPU mirrors |

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent,
B block size, Q query rows of one request, C cached tokens of one request.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Literal

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.mla.builder import MLAMetadataBuilder
from attn_ops.backends.mla.forward import mla_forward, plan_of
from attn_ops.backends.mla.kernels import MLAKernels
from attn_ops.metadata import (
    KV_CACHE_DTYPES,
    AttentionCGSupport,
    CommonAttentionMetadata,
    LatentOptions,
    kv_dtype_of,
)

Algorithm = Literal["absorbed", "up-projected"]
"""Keys and values of the latents, or q and the output brought to the latents."""


class TorchMLAMetadataBuilder(MLAMetadataBuilder):
    """Its kernels read lengths on the host."""

    cudagraph_support = AttentionCGSupport.NEVER


def reference_mla_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: LatentOptions,
    compute_dtype: torch.dtype = torch.float64,
    algorithm: Algorithm = "absorbed",
) -> torch.Tensor:
    """Latent attention request by request: [T, N, V] in `compute_dtype`, padding rows zero.

    Both algorithms give the same numbers, up to rounding (arXiv:2405.04434, section 2.1):
    absorbed, a head's scores are (q_nope W_UK).c + q_pe.k_pe and its output (weights c) W_UV^T;
    up-projected, they are q.[W_UK c, k_pe], and the output is weights (W_UV c).

    Args:
        q: [T, N, P + R].
        kv_cache: [P, B, Lkv + R], this step's latents in it.
        common: the batch; causal.
        options: the layer's; `lse` is written.
        compute_dtype: of all arithmetic.
        algorithm: absorbed or up-projected.
    """
    num_heads = q.shape[1]
    attend = _absorbed if algorithm == "absorbed" else _up_projected
    w_uk_NPL, w_uv_NVL = (
        w.to(compute_dtype) for w in (options.w_uk(num_heads), options.w_uv(num_heads))
    )
    out_TNV = torch.zeros(*q.shape[:2], options.v_head_dim, dtype=compute_dtype, device=q.device)
    if options.lse is not None:
        options.lse.fill_(float("-inf"))
    starts, seq_lens = lengths(common)
    for request, num_cached in enumerate(seq_lens):
        begin, end = starts[request], starts[request + 1]
        if begin == end or num_cached == 0:
            continue
        latent_CL = cached_latents(
            kv_cache, common.block_table_tensor[request], num_cached, compute_dtype,
            kv_dtype_of(options.kv_cache_dtype), options.kv_scale,
        )  # fmt: skip
        q_QNH = q[begin:end].to(compute_dtype)
        scores_NQC, value = attend(q_QNH, latent_CL, w_uk_NPL, w_uv_NVL)
        weights_NQC, lse_NQ = _weights(options.scale * scores_NQC)
        out_TNV[begin:end] = value(weights_NQC)
        if options.lse is not None:
            options.lse[begin:end] = lse_NQ.t()
    return out_TNV


def cached_latents(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_cached: int,
    compute_dtype: torch.dtype,
    fp8: torch.dtype | None,
    kv_scale: torch.Tensor | None,
) -> torch.Tensor:
    """[C, Lkv + R]: latents and rotated keys of one request, as they are meant."""
    blocks = block_table[: -(-num_cached // kv_cache.shape[1])].long()
    latent_CL = kv_cache[blocks].flatten(0, 1)[:num_cached]
    if fp8 is None:
        return latent_CL.to(compute_dtype)
    latent_CL = latent_CL.contiguous().view(fp8).to(compute_dtype)
    return latent_CL if kv_scale is None else latent_CL * kv_scale


def lengths(common: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
    """query_start_loc and seq_lens on the host; without a mirror that reads the device."""
    starts, seq_lens = common.query_start_loc_cpu, common.seq_lens_cpu
    starts = common.query_start_loc if starts is None else starts
    return starts.tolist(), (common.seq_lens if seq_lens is None else seq_lens).tolist()


def _absorbed(
    q_QNH: torch.Tensor, latent_CL: torch.Tensor, w_uk_NPL: torch.Tensor, w_uv_NVL: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """MQA over the latents: scores [N, Q, C], and what makes [Q, N, V] of weights."""
    num_nope, rank = w_uk_NPL.shape[1:]
    ql_NQL = torch.bmm(q_QNH[..., :num_nope].transpose(0, 1), w_uk_NPL)
    q_NQL = torch.cat([ql_NQL, q_QNH[..., num_nope:].transpose(0, 1)], dim=-1)
    scores_NQC = q_NQL @ latent_CL.t()

    def value(weights_NQC: torch.Tensor) -> torch.Tensor:
        return torch.bmm(weights_NQC @ latent_CL[:, :rank], w_uv_NVL.mT).transpose(0, 1)

    return scores_NQC, value


def _up_projected(
    q_QNH: torch.Tensor, latent_CL: torch.Tensor, w_uk_NPL: torch.Tensor, w_uv_NVL: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """MHA over the keys and values that the latents stand for; as `_absorbed`."""
    rank = w_uk_NPL.shape[2]
    c_CL, k_pe_CR = latent_CL[:, :rank], latent_CL[:, rank:]
    k_nope_NCP = c_CL @ w_uk_NPL.mT
    k_NCH = torch.cat([k_nope_NCP, k_pe_CR.expand(len(w_uk_NPL), -1, -1)], dim=-1)
    v_NCV = c_CL @ w_uv_NVL.mT
    scores_NQC = torch.bmm(q_QNH.transpose(0, 1), k_NCH.mT)

    def value(weights_NQC: torch.Tensor) -> torch.Tensor:
        return torch.bmm(weights_NQC, v_NCV).transpose(0, 1)

    return scores_NQC, value


def _weights(scores_NQC: torch.Tensor, causal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax and log-sum-exp of scores; causal, the Q queries are the last of C tokens."""
    num_queries, num_cached = scores_NQC.shape[1:]
    if causal:
        key_C = torch.arange(num_cached, device=scores_NQC.device)
        hidden_QC = key_C > key_C[num_cached - num_queries :].unsqueeze(1)
        scores_NQC = scores_NQC.masked_fill(hidden_QC, float("-inf"))
    return scores_NQC.softmax(-1), scores_NQC.logsumexp(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which products are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def decode(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    part: CommonAttentionMetadata,
    *,
    scale: float,
    kv_cache_dtype: str,
    kv_scale: torch.Tensor | None,
    lse: torch.Tensor | None = None,
    plan: object = None,
) -> torch.Tensor:
    """See `Decode` in kernels.py."""
    dtype, rank = _wide(ql_nope.dtype), ql_nope.shape[2]
    out_DNL = torch.zeros(ql_nope.shape, dtype=ql_nope.dtype, device=ql_nope.device)
    if lse is not None:
        lse.fill_(float("-inf"))
    starts, seq_lens = lengths(part)
    for request, num_cached in enumerate(seq_lens):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop or num_cached == 0:
            continue
        latent_CL = cached_latents(
            kv_cache, part.block_table_tensor[request], num_cached, dtype,
            kv_dtype_of(kv_cache_dtype), kv_scale,
        )  # fmt: skip
        q_NQL = torch.cat([ql_nope[rows], q_pe[rows]], dim=-1).to(dtype).transpose(0, 1)
        weights_NQC, lse_NQ = _weights(scale * (q_NQL @ latent_CL.t()))
        out_DNL[rows] = (weights_NQC @ latent_CL[:, :rank]).transpose(0, 1).to(out_DNL.dtype)
        if lse is not None:
            lse[rows] = lse_NQ.t()
    return out_DNL


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    causal: bool,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `Prefill` in kernels.py."""
    dtype = _wide(q.dtype)
    out_TNV = q.new_empty(*q.shape[:2], v.shape[2])
    lse_TN = q.new_empty(q.shape[:2], dtype=dtype)
    for of_q, of_k in zip(_ranges(cu_q), _ranges(cu_k), strict=True):
        q_NQH, k_NKH, v_NKV = (x.to(dtype).transpose(0, 1) for x in (q[of_q], k[of_k], v[of_k]))
        weights_NQK, lse_NQ = _weights(scale * torch.bmm(q_NQH, k_NKH.mT), causal)
        out_TNV[of_q] = torch.bmm(weights_NQK, v_NKV).transpose(0, 1).to(q.dtype)
        lse_TN[of_q] = lse_NQ.t()
    return out_TNV, lse_TN if with_lse else None


def _ranges(cu: torch.Tensor) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise(cu.tolist())]


BACKEND = Backend(
    name="TORCH_MLA",
    support=Support(
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        cudagraph=AttentionCGSupport.NEVER,
        kv_cache_dtypes=tuple(KV_CACHE_DTYPES),
        lse=True,
        latent=True,
    ),
    builder=TorchMLAMetadataBuilder,
    forward=functools.partial(mla_forward, MLAKernels(decode, prefill)),
    plan_of=plan_of,
)
