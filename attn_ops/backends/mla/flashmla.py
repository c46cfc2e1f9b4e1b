"""FLASHMLA: latent attention by DeepSeek's FlashMLA, its own package or the copy in vLLM.

| devices | dtypes | sizes | block sizes | KV cache | CUDA graph |
|---|---|---|---|---|---|
| cuda, sm_90 | fp16, bf16 | Lkv 512, R 64 | 64 | auto | uniform batches |

FlashMLA takes queries of one length. Those of a ragged batch are placed at the end of rows of equal
length, where the causal mask is theirs. Its tile scheduler is planned on the device by the first
layer of a step, so that a captured step plans anew. The prefill way is FLASHINFER_MLA's.

D rows of the decode way, N query heads, R head size with RoPE, H = Lkv + R, Lkv latent, S requests,
Q rows of the longest request, P blocks, B block size.
"""

import functools
import importlib
import math
from types import ModuleType

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.mla.builder import MLAMetadataBuilder
from attn_ops.backends.mla.flashinfer_mla import FlashInferMLABackend, prefill
from attn_ops.backends.mla.forward import mla_forward, plan_of
from attn_ops.backends.mla.kernels import MLAKernels
from attn_ops.metadata import AttentionCGSupport, AttentionSpec, CommonAttentionMetadata

LIBRARIES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
ROTATED = 64
"""R: the kernel has no other."""


# Cached: a library that is missing takes time to miss, and every selection asks.
@functools.cache
def find_library() -> ModuleType | None:
    """The first of `LIBRARIES` that imports, or None."""
    for name in LIBRARIES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


# Cached: imports a library, and asks the device; each selection asks.
@functools.cache
def unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "a CUDA device must be present, got none"
    if torch.cuda.get_device_capability()[0] != 9:
        return f"the GPU must be sm_90, got {torch.cuda.get_device_name()}"
    if find_library() is None:
        return f"a FlashMLA library must be installed, got none; supported: {', '.join(LIBRARIES)}"
    return None


class Planned:
    """The rows of a part as FlashMLA takes them, and its plan for layers of one geometry.

    Attributes:
        longest: Q.
        rows: [D] int64, the place of each row among S * Q; None: they are in their places.
        scheduler: two values that the library makes, and may fill in the first call.
    """

    def __init__(self, part: CommonAttentionMetadata, num_heads: int) -> None:
        library = find_library()
        assert library is not None, "FLASHMLA is selected only where a library was found"
        self.call = library.flash_mla_with_kvcache
        self.longest, self.num_reqs = part.max_query_len, part.num_reqs
        self.rows = None
        if part.num_actual_tokens != self.longest * part.num_reqs:
            self.rows = _places(part.query_start_loc, part.num_actual_tokens, self.longest)
        self.scheduler = library.get_mla_metadata(part.seq_lens, self.longest * num_heads, 1)

    def padded(self, q_DNH: torch.Tensor) -> torch.Tensor:
        """[S, Q, N, H]"""
        if self.rows is not None:
            q_all = q_DNH.new_zeros(self.num_reqs * self.longest, *q_DNH.shape[1:])
            q_DNH = q_all.index_copy_(0, self.rows, q_DNH)
        return q_DNH.view(self.num_reqs, self.longest, *q_DNH.shape[1:])

    def own(self, x_SQ: torch.Tensor) -> torch.Tensor:
        """[S, Q, ...] -> [D, ...]"""
        flat = x_SQ.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]


def _places(starts: torch.Tensor, num_rows: int, longest: int) -> torch.Tensor:
    """[D] int64: each row of a request so that its last is the last of `longest`."""
    row_D = torch.arange(num_rows, device=starts.device)
    ends_S = starts[1:].long()
    request_D = torch.searchsorted(ends_S, row_D, right=True)
    return (request_D + 1) * longest - ends_S[request_D] + row_D


class FlashMLAMetadataBuilder(MLAMetadataBuilder):
    """Gives FlashMLA's tile scheduler the requests of the decode way."""

    def plan_decode(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> Planned | None:
        return Planned(common, spec.num_heads) if common.num_actual_tokens else None


def absorb(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """See `Absorb` in kernels.py; leaves room for the rotated part behind each head's result."""
    num_rows, num_heads, rank = *q_nope.shape[:2], w_uk.shape[2]
    q_DNH = q_nope.new_empty(num_rows, num_heads, rank + ROTATED)
    torch.bmm(q_nope.transpose(0, 1), w_uk, out=q_DNH[..., :rank].transpose(0, 1))
    return q_DNH[..., :rank]


def _both_parts(ql_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
    """[D, N, H]: what `absorb` made, completed in place."""
    (num_rows, num_heads, rank), size = ql_nope.shape, ql_nope.shape[2] + q_pe.shape[2]
    whole = num_rows, num_heads, size
    strides = num_heads * size, size, 1
    if ql_nope.stride() != strides:
        return torch.cat([ql_nope, q_pe], 2)
    q_DNH = ql_nope.as_strided(whole, strides)
    q_DNH[..., rank:] = q_pe
    return q_DNH


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
    if lse is not None:
        lse[rows:].fill_(-math.inf)
    if rows == 0:
        return torch.zeros_like(ql_nope, memory_format=torch.contiguous_format)
    plan = plan or Planned(part, ql_nope.shape[1])
    q_DNH = _both_parts(ql_nope, q_pe)[:rows]
    out_SQNL, lse_SNQ = plan.call(
        plan.padded(q_DNH), kv_cache.unsqueeze(2), part.block_table_tensor, part.seq_lens, rank,
        *plan.scheduler, softmax_scale=scale, causal=True,
    )  # fmt: skip
    if lse is not None:
        own = plan.own(lse_SNQ.transpose(1, 2))
        lse[:rows] = own.masked_fill(own == math.inf, -math.inf)  # the library's sign of no keys
    out_DNL = plan.own(out_SQNL)
    if rows == ql_nope.shape[0]:
        return out_DNL
    return torch.cat([out_DNL, out_DNL.new_zeros(ql_nope.shape[0] - rows, *out_DNL.shape[1:])])


BACKEND: Backend = FlashInferMLABackend(
    name="FLASHMLA",
    support=Support(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        block_sizes=(64,),
        cudagraph=AttentionCGSupport.UNIFORM_BATCH,
        lse=True,
        latent=True,
        latent_sizes=((512, ROTATED),),
    ),
    builder=FlashMLAMetadataBuilder,
    forward=functools.partial(mla_forward, MLAKernels(decode, prefill, absorb=absorb)),
    unavailable=unavailable,
    plan_of=plan_of,
)
