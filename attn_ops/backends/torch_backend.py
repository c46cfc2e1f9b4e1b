"""TORCH: attention in plain PyTorch, on any device; the oracle for every other backend.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| any | float64, float32, float16, bfloat16 | any | any | yes | yes | never: reads CPU mirrors |

T tokens, S requests, N query heads, K kv heads, G = N // K, H head size, P blocks, B block size,
Q query rows of one request, C cached tokens of one request.
"""

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


class TorchMetadataBuilder(AttentionMetadataBuilder):
    """Nothing to plan: the reference reads the batch itself."""

    cudagraph_support = AttentionCGSupport.NEVER


def reference_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Causal paged attention computed in `compute_dtype`: [T, N, H] in that dtype, padding zero.

    Scores are scale * q.k, capped to soft_cap * tanh(s / soft_cap) (Gemma 2,
    arXiv:2408.00118), masked, then softmax.
    """
    out_TNH = torch.zeros(q.shape, dtype=compute_dtype, device=q.device)
    starts = _first_known(common.query_start_loc_cpu, common.query_start_loc)
    block_size = kv_cache.shape[2]
    for request, num_cached in enumerate(_first_known(common.seq_lens_cpu, common.seq_lens)):
        begin, end = starts[request], starts[request + 1]
        if begin == end or num_cached == 0:
            continue
        blocks = common.block_table_tensor[request, : -(-num_cached // block_size)].long()
        kv_2CKH = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :num_cached].to(compute_dtype)
        q_QNH = q[begin:end].to(compute_dtype)
        out_TNH[begin:end] = _attend(
            q_QNH, kv_2CKH[0], kv_2CKH[1], scale, sliding_window, soft_cap, common.causal
        )
    return out_TNH


def _first_known(mirror: torch.Tensor | None, tensor: torch.Tensor) -> list[int]:
    """Values on the host; a mirror that is not there costs a read of the device."""
    return (tensor if mirror is None else mirror).tolist()


def _attend(
    q_QNH: torch.Tensor,
    k_CKH: torch.Tensor,
    v_CKH: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    causal: bool,
) -> torch.Tensor:
    """One request: its Q queries are the last Q of its C cached tokens."""
    (num_queries, num_heads, head_size), (num_cached, num_kv_heads, _) = q_QNH.shape, k_CKH.shape
    q_KGQH = q_QNH.view(num_queries, num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
    scores_KGQC = scale * torch.matmul(q_KGQH, k_CKH.permute(1, 2, 0).unsqueeze(1))
    if soft_cap is not None:
        scores_KGQC = soft_cap * torch.tanh(scores_KGQC / soft_cap)
    position_Q1 = torch.arange(num_cached - num_queries, num_cached, device=q_QNH.device).unsqueeze(
        1
    )
    key_1C = torch.arange(num_cached, device=q_QNH.device).unsqueeze(0)
    hidden_QC = key_1C > position_Q1 if causal else torch.zeros_like(key_1C > position_Q1)
    if sliding_window is not None:
        hidden_QC = hidden_QC | (key_1C <= position_Q1 - sliding_window)
    weights_KGQC = scores_KGQC.masked_fill(hidden_QC, float("-inf")).softmax(dim=-1)
    out_KGQH = torch.matmul(weights_KGQC, v_CKH.transpose(0, 1).unsqueeze(1))
    return out_KGQH.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_size)


def forward(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """The reference in float32, or in float64 for float64 inputs."""
    compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = reference_attention(
        q, kv_cache, meta.common, scale, sliding_window, soft_cap, compute_dtype
    )
    return out.to(q.dtype)


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
    ),
    builder=TorchMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
)
