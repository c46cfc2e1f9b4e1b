"""FLASHINFER_MLA: latent attention by FlashInfer, planned on the host once a step and scale.

| devices | dtypes | sizes | block sizes | KV cache | CUDA graph |
|---|---|---|---|---|---|
| cuda, sm_80+ | fp16, bf16 | Lkv 512, R 64 | 16 to 128 | auto | never: planned on the host |

The decode way is `BatchMLAPagedAttentionWrapper`: FA3 kernels on sm_90, FA2 elsewhere. The prefill
way is FLASH_ATTN_MLA's where FA3 is there, else TRITON_MLA's.

T tokens, D rows of the decode way, N query heads, R head size with RoPE, Lkv latent, P blocks,
B block size, S requests.
"""

import functools
from typing import Any

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.flash_attn.library import fa_version
from attn_ops.backends.flash_attn.library import unavailable as flash_attn_unavailable
from attn_ops.backends.flashinfer import unavailable
from attn_ops.backends.flashinfer.wrappers import Kind, Wrapper, Wrappers
from attn_ops.backends.mla import flash_attn_mla, triton_mla
from attn_ops.backends.mla.builder import MLAMetadataBuilder
from attn_ops.backends.mla.forward import mla_forward, plan_of
from attn_ops.backends.mla.kernels import MLAKernels
from attn_ops.backends.mla.torch_mla import lengths
from attn_ops.metadata import AttentionCGSupport, AttentionSpec, CommonAttentionMetadata


class Planned:
    """The decode part of a batch, planned for each scale that a layer asks for: mostly one.

    FlashInfer's `run` takes no scale, and layers of one geometry may differ in it. The wrappers go
    back when this does.
    """

    def __init__(
        self,
        wrappers: Wrappers,
        device: torch.device,
        arguments: dict[str, Any],
        empty_D: torch.Tensor | None,
    ) -> None:
        self.empty_D = empty_D  # bool: rows of requests without tokens; None: there is none
        self._wrappers, self._device, self._arguments = wrappers, device, arguments
        self._by_scale: dict[float, Wrapper] = {}

    def wrapper(self, scale: float) -> Wrapper:
        """The one that is planned for `scale`, made by the first layer that asks."""
        found = self._by_scale.get(scale)
        if found is None:
            with torch.cuda.device(self._device):
                found = self._wrappers.take(Kind.MLA, self._device)
                found.plan(**self._arguments, sm_scale=scale)
            self._wrappers.lend({Kind.MLA: found}, self)
            self._by_scale[scale] = found
        return found


class FlashInferMLAMetadataBuilder(MLAMetadataBuilder):
    """Gathers what FlashInfer plans the requests of the decode way with."""

    cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._wrappers = Wrappers((), 128 << 20)

    def plan_decode(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> Planned | None:
        starts, seq_lens = (
            torch.tensor(part, dtype=torch.int32, device="cpu") for part in lengths(common)
        )
        if int(starts[-1]) == 0:
            return None
        assert spec.latent is not None, "the backend takes no other layers"
        pages = (seq_lens + self.block_size - 1) // self.block_size
        page_starts = torch.zeros(len(pages) + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(pages, 0, out=page_starts[1:])
        arguments = {
            "qo_indptr": starts,
            "kv_indptr": page_starts,
            "kv_indices": _pages(common.block_table_tensor, pages),
            "kv_len_arr": seq_lens,
            "num_heads": spec.num_heads,
            "head_dim_ckv": spec.latent.kv_lora_rank,
            "head_dim_kpe": spec.latent.qk_rope_head_dim,
            "page_size": self.block_size,
            "causal": True,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.dtype,
        }
        empty_D = torch.repeat_interleave(seq_lens == 0, starts.diff())
        empty_D = empty_D.to(common.device, non_blocking=True) if empty_D.any() else None
        return Planned(self._wrappers, common.device, arguments, empty_D)


def _pages(block_table_SM: torch.Tensor, pages_S: torch.Tensor) -> torch.Tensor:
    """The requests' blocks, one after the other."""
    request = torch.repeat_interleave(torch.arange(len(pages_S), device="cpu"), pages_S)
    first_S = pages_S.cumsum(0) - pages_S
    place = torch.arange(len(request), device="cpu") - first_S[request]
    index = request * block_table_SM.stride(0) + place
    flat = block_table_SM.as_strided((int(block_table_SM.stride(0)) * len(pages_S),), (1,))
    return flat[index.to(block_table_SM.device, non_blocking=True)]


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
    plan: Planned | None = None,
) -> torch.Tensor:
    """See `Decode` in kernels.py."""
    rows, rank = part.num_actual_tokens, ql_nope.shape[2]
    out_DNL = torch.empty(ql_nope.shape, dtype=ql_nope.dtype, device=ql_nope.device)
    out_DNL[rows:].zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
    if plan is None:
        return out_DNL.zero_()
    plan.wrapper(scale).run(
        ql_nope[:rows].contiguous(), q_pe[:rows].contiguous(), kv_cache[..., :rank],
        kv_cache[..., rank:], out=out_DNL[:rows], lse=None if lse is None else lse[:rows],
        return_lse=lse is not None, return_lse_base_on_e=True,
    )  # fmt: skip
    if lse is not None and plan.empty_D is not None:  # the library does not write -inf there
        lse[:rows].masked_fill_(plan.empty_D[:, None], float("-inf"))
    return out_DNL


def prefill(*tensors: Any, **asked: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `Prefill` in kernels.py."""
    by_fa3 = flash_attn_unavailable() is None and fa_version() == 3
    return (flash_attn_mla if by_fa3 else triton_mla).prefill(*tensors, **asked)


class FlashInferMLABackend(Backend):
    """What depends on sizes."""

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = super().reasons_against(spec, block_size, device)
        return reasons or flash_attn_mla.reasons_of_sizes(spec)


BACKEND = FlashInferMLABackend(
    name="FLASHINFER_MLA",
    support=Support(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        block_sizes=(16, 32, 64, 128),
        cudagraph=AttentionCGSupport.NEVER,
        lse=True,
        latent=True,
        latent_sizes=((512, 64),),
    ),
    builder=FlashInferMLAMetadataBuilder,
    forward=functools.partial(mla_forward, MLAKernels(decode, prefill)),
    unavailable=unavailable,
    plan_of=plan_of,
)
