"""TORCH: attention in plain PyTorch, on any device; its reference is every backend's oracle.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| any | float64, float32, float16, bfloat16 | any | any | yes | yes | never: reads CPU mirrors |

On a CPU `forward` and `varlen` go through `torch_sdpa`: `scaled_dot_product_attention` over buckets
of requests. `attend_batch`, a loop over requests, computes float64, soft cap, sinks, the
log-sum-exp and other devices. `reference_attention` never takes the fast path.

T tokens, S requests, N query heads, K kv heads, G = N // K, H head size, P blocks, B block size,
Q query rows of one request, C cached tokens of one request.
"""

import itertools
from typing import Any

import torch

from attn_ops.backends import torch_sdpa
from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.block_layout.masks import token_mask, visible_blocks
from attn_ops.block_layout.tables import BlockTables, layout_arguments
from attn_ops.metadata import (
    KV_CACHE_DTYPES,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    kv_dtype_of,
)


class TorchMetadataBuilder(AttentionMetadataBuilder):
    """Nothing to plan: the reference reads the batch itself."""

    cudagraph_support = AttentionCGSupport.NEVER
    plans_on_host = True


def reference_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    compute_dtype: torch.dtype = torch.float64,
    blocksparse: BlockTables | None = None,
    **options: Any,
) -> torch.Tensor:
    """Paged attention computed in `compute_dtype`: [T, N, H] in that dtype, padding zero.

    Scores are scale * q.k, capped to soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv:2408.00118),
    lowered by ALiBi (arXiv:2108.12409), masked, then softmax with the head's sink as one more logit
    without a value (GPT-OSS). `options` are the other fields of `AttentionOptions`.
    """
    options |= layout_arguments(blocksparse)
    asked = AttentionOptions(scale, sliding_window, soft_cap, **options)
    return attend_batch(q, kv_cache, common, asked, compute_dtype)


def attend_batch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """`reference_attention`, request by request; writes `options.lse`."""
    out_TNH = torch.zeros(q.shape, dtype=compute_dtype, device=q.device)
    if options.lse is not None:
        options.lse.fill_(float("-inf"))
    starts, seq_lens = _lengths(common)
    for request, num_cached in enumerate(seq_lens):
        begin, end = starts[request], starts[request + 1]
        if begin == end or num_cached == 0:
            continue
        k_CKH, v_CKH = cached(kv_cache, common, request, num_cached, options, compute_dtype)
        q_QNH = q[begin:end].to(compute_dtype)
        out_QNH, lse_QN = _attend(q_QNH, k_CKH, v_CKH, options, common.causal)
        out_TNH[begin:end] = out_QNH
        if options.lse is not None:
            options.lse[begin:end] = lse_QN
    return out_TNH


def cached(
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    request: int,
    num_cached: int,
    options: AttentionOptions,
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """[2, C, K, H]: keys and values of one request, as they are meant."""
    block_size = kv_cache.shape[2]
    blocks = common.block_table_tensor[request, : -(-num_cached // block_size)].long()
    kv_2CKH = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :num_cached]
    fp8 = kv_dtype_of(options.kv_cache_dtype)
    if fp8 is None:
        return kv_2CKH.to(compute_dtype)
    kv_2CKH = kv_2CKH.contiguous().view(fp8).to(compute_dtype)
    scales = (options.k_scale, options.v_scale)
    return torch.stack([x if s is None else x * s for x, s in zip(kv_2CKH, scales, strict=True)])


def _lengths(common: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
    """query_start_loc and seq_lens, on the host."""
    return (
        _first_known(common.query_start_loc_cpu, common.query_start_loc),
        _first_known(common.seq_lens_cpu, common.seq_lens),
    )


def _first_known(mirror: torch.Tensor | None, tensor: torch.Tensor) -> list[int]:
    """Values on the host; a mirror that is not there costs a read of the device."""
    return (tensor if mirror is None else mirror).tolist()


def _attend(
    q_QNH: torch.Tensor,
    k_CKH: torch.Tensor,
    v_CKH: torch.Tensor,
    options: AttentionOptions,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request, its Q queries the last of its C tokens: [Q, N, H] and log-sum-exp [Q, N]."""
    (num_queries, num_heads, head_size), (num_cached, num_kv_heads, _) = q_QNH.shape, k_CKH.shape
    q_KGQH = q_QNH.view(num_queries, num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
    scores_KGQC = options.scale * torch.matmul(q_KGQH, k_CKH.permute(1, 2, 0).unsqueeze(1))
    if options.soft_cap is not None:
        scores_KGQC = options.soft_cap * torch.tanh(scores_KGQC / options.soft_cap)
    first = num_cached - num_queries
    position_Q1 = torch.arange(first, num_cached, device=q_QNH.device).unsqueeze(1)
    key_1C = torch.arange(num_cached, device=q_QNH.device).unsqueeze(0)
    if options.alibi_slopes is not None:
        slope_KG11 = options.alibi_slopes.to(q_QNH.dtype).view(num_kv_heads, -1, 1, 1)
        scores_KGQC = scores_KGQC - slope_KG11 * (position_Q1 - key_1C).abs()
    hidden_QC = key_1C > position_Q1 if causal else torch.zeros_like(key_1C > position_Q1)
    if options.sliding_window is not None:
        hidden_QC = hidden_QC | (key_1C <= position_Q1 - options.sliding_window)
        if not causal:
            hidden_QC = hidden_QC | (key_1C >= position_Q1 + options.sliding_window)
    scores_KGQC = scores_KGQC.masked_fill(hidden_QC, float("-inf"))
    if options.block_layout is not None and options.sparse_block_size is not None:
        size, (starts, columns, *_) = options.sparse_block_size, options.block_layout
        seen_NRR = visible_blocks(starts, columns, -(-num_cached // size))
        seen_NQC = token_mask(seen_NRR, size, num_queries, num_cached)
        hidden_KGQC = ~seen_NQC.unflatten(0, (num_kv_heads, -1))
        scores_KGQC = scores_KGQC.masked_fill(hidden_KGQC, float("-inf"))
        # What no row sees may be NaN, which a weight of zero would not hide.
        v_CKH = v_CKH.masked_fill(hidden_KGQC.all(dim=(1, 2)).T.unsqueeze(-1), 0.0)
    logits_KGQC = scores_KGQC
    if options.sinks is not None:
        sink_KG11 = options.sinks.to(q_QNH.dtype).view(num_kv_heads, -1, 1, 1)
        logits_KGQC = torch.cat([scores_KGQC, sink_KG11.expand(-1, -1, num_queries, 1)], dim=-1)
    lse_KGQ1 = logits_KGQC.logsumexp(dim=-1, keepdim=True)
    weights_KGQC = logits_KGQC.softmax(dim=-1)[..., :num_cached]
    # A row that sees no key has no softmax: -inf - -inf is NaN.
    weights_KGQC = weights_KGQC.masked_fill(lse_KGQ1 == float("-inf"), 0.0)
    out_KGQH = torch.matmul(weights_KGQC, v_CKH.transpose(0, 1).unsqueeze(1))
    lse_QN = lse_KGQ1.squeeze(-1).permute(2, 0, 1).reshape(num_queries, num_heads)
    return out_KGQH.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1), lse_QN


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """By `torch_sdpa` where it can; else the reference, in float64 for float64, else float32."""
    if torch_sdpa.takes(q, options):
        starts, seq_lens = _lengths(meta.common)
        return torch_sdpa.forward(q, kv_cache, meta.common, options, starts, seq_lens)
    compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return attend_batch(q, kv_cache, meta.common, options, compute_dtype).to(q.dtype)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """As `forward`, over this step's own keys."""
    starts = _first_known(meta.common.query_start_loc_cpu, meta.common.query_start_loc)
    if torch_sdpa.takes(q, options):
        return torch_sdpa.varlen(q, k, v, meta.common.causal, options, starts)
    compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_TNV = q.new_zeros(*q.shape[:2], v.shape[2])
    for begin, end in itertools.pairwise(starts):
        if begin < end:
            q_QNH, k_CKH, v_CKV = (x[begin:end].to(compute_dtype) for x in (q, k, v))
            out_QNV, _ = _attend(q_QNH, k_CKH, v_CKV, options, meta.common.causal)
            out_TNV[begin:end] = out_QNV.to(q.dtype)
    return out_TNV


def unavailable() -> None:
    """It runs wherever PyTorch does."""
    return None


BACKEND = Backend(
    name="TORCH",
    support=Support(
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        head_sizes=(),
        block_sizes=(),
        sliding_window=True,
        soft_cap=True,
        cudagraph=AttentionCGSupport.NEVER,
        kv_cache_dtypes=tuple(KV_CACHE_DTYPES),
        alibi=True,
        sinks=True,
        non_causal=True,
        lse=True,
        varlen_v_head_size=True,
        blocksparse=True,
    ),
    builder=TorchMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
    varlen=varlen,
)
