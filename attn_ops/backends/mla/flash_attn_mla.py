"""FLASH_ATTN_MLA: latent attention by FlashAttention 3 of the vLLM builds.

| devices | dtypes | sizes | block sizes | KV cache | CUDA graph |
|---|---|---|---|---|---|
| cuda, sm_90 | fp16, bf16 | Lkv 512, R 64, P + R <= 256 | 16, 32 | auto | uniform batches |

The decode way gives FA3 the rotated part as query and key, and the latent as value and, by `q_v`,
as the other part of the scores. A plan for its tile scheduler is computed on the device, once a
step and geometry, so that a captured step computes it again. With pages of 64 tokens a NaN after a
request's last token reaches the output (vLLM 0.24.0, one H200, 2026-11-22).

T tokens, D rows of the decode way, N query heads, P head size without RoPE, R with RoPE, V head
size of values, Lkv latent, P blocks, B block size.
"""

import functools
import math
from typing import Any

import torch
from torch.nn.functional import pad

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.finite import finite_values
from attn_ops.backends.flash_attn.library import (
    LIBRARIES,
    fa_version,
    found_library,
    unavailable,
    varlen_function,
)
from attn_ops.backends.mla.builder import MLAMetadataBuilder
from attn_ops.backends.mla.forward import mla_forward, plan_of
from attn_ops.backends.mla.kernels import MLAKernels
from attn_ops.metadata import AttentionCGSupport, AttentionSpec, CommonAttentionMetadata

OWN_VALUE_SIZES = {(192, 128)}
"""Head sizes of q and k, and of values, that FA3's prefill kernels take if they differ."""

MOST_HEAD_SIZE = 256


class FlashAttentionMLAMetadataBuilder(MLAMetadataBuilder):
    """Plans FA3's tile scheduler for the requests of the decode way."""

    def plan_decode(
        self, spec: AttentionSpec, common: CommonAttentionMetadata
    ) -> torch.Tensor | None:
        if common.num_reqs == 0:
            return None
        assert spec.latent is not None, "the backend takes no other layers"
        return found_library()[1].get_scheduler_metadata(
            batch_size=common.num_reqs,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            num_heads_q=spec.num_heads,
            num_heads_kv=1,
            headdim=spec.latent.qk_rope_head_dim,
            headdim_v=spec.latent.kv_lora_rank,
            cache_seqlens=common.seq_lens,
            qkv_dtype=spec.dtype,
            cu_seqlens_q=common.query_start_loc,
            page_size=self.block_size,
            causal=True,
        )


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
    plan: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Decode` in kernels.py."""
    rows, rank = part.num_actual_tokens, ql_nope.shape[2]
    out_DNL = torch.empty(ql_nope.shape, dtype=ql_nope.dtype, device=ql_nope.device)
    out_DNL[rows:].zero_()
    if lse is not None:
        lse.fill_(-math.inf)
    if rows == 0:
        return out_DNL
    cache_PBKH = kv_cache.unsqueeze(2)
    result = varlen_function()(
        q=q_pe,
        k=cache_PBKH[..., rank:],
        v=cache_PBKH[..., :rank],
        q_v=ql_nope,
        out=out_DNL,
        max_seqlen_q=part.max_query_len,
        cu_seqlens_q=part.query_start_loc,
        max_seqlen_k=part.max_seq_len,
        seqused_k=part.seq_lens,
        block_table=part.block_table_tensor,
        softmax_scale=scale,
        causal=True,
        fa_version=3,
        scheduler_metadata=plan,
        return_softmax_lse=lse is not None,
    )
    if lse is not None:
        lse[:rows] = result[1][:, :rows].transpose(0, 1)
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
    """See `Prefill` in kernels.py; values are padded where FA3 has no kernel for their size."""
    if len(cu_k) > 2:  # tiles of keys reach into the next request's
        k, v = finite_values(k, v)
    sizes = q.shape[2], v.shape[2]
    padded = sizes[0] != sizes[1] and sizes not in OWN_VALUE_SIZES
    result: Any = varlen_function()(
        q=q,
        k=k,
        v=pad(v, (0, sizes[0] - sizes[1])) if padded else v,
        max_seqlen_q=max_q,
        cu_seqlens_q=cu_q,
        max_seqlen_k=max_k,
        cu_seqlens_k=cu_k,
        softmax_scale=scale,
        causal=causal,
        fa_version=3,
        return_softmax_lse=with_lse,
    )
    out, lse = (result[0], result[1].transpose(0, 1)) if with_lse else (result, None)
    return (out[..., : sizes[1]] if padded else out), lse


class FlashAttentionMLABackend(Backend):
    """What depends on sizes and on the library that is there."""

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = super().reasons_against(spec, block_size, device)
        if reasons or spec.latent is None:
            return reasons
        if fa_version() != 3:
            reasons.append(
                f"FLASH_ATTN library must have FA3 with q_v, got {found_library()[0]}; supported: "
                f"{', '.join(LIBRARIES[:2])} on sm_90"
            )
        return reasons + reasons_of_sizes(spec)


def reasons_of_sizes(spec: AttentionSpec) -> list[str]:
    """Why FA3 cannot attend to a latent layer's up-projected keys; empty if it can."""
    assert spec.latent is not None, "asked of latent layers only"
    got = spec.latent.qk_head_dim, spec.latent.v_head_dim
    if got[0] <= MOST_HEAD_SIZE and got[1] <= got[0]:
        return []
    return [
        f"head sizes must be at most {MOST_HEAD_SIZE}, and values no larger than keys, with FA3, "
        f"got {got[0]} and {got[1]}"
    ]


KERNELS = MLAKernels(decode, prefill)

BACKEND = FlashAttentionMLABackend(
    name="FLASH_ATTN_MLA",
    support=Support(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        block_sizes=(16, 32),
        cudagraph=AttentionCGSupport.UNIFORM_BATCH,
        lse=True,
        latent=True,
        latent_sizes=((512, 64),),
    ),
    builder=FlashAttentionMLAMetadataBuilder,
    forward=functools.partial(mla_forward, KERNELS),
    unavailable=unavailable,
    plan_of=plan_of,
)
