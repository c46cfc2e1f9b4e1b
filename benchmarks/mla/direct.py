"""Kernels of latent attention called by hand: libraries, and the launchers of TRITON_MLA.

Each function plans outside the graph what the library plans, and gives back a call of one layer
that takes q through W_UK and gives the latents weighted by attention, [T, N, Lkv]. All requests of
a batch are equal.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.direct import vllm_flash_attn
from benchmarks.mla.inputs import Layers

Attend = Callable[[int], torch.Tensor]


def triton_mla(layers: Layers, **choice: Any) -> Attend:
    """The project's own launcher; `choice` overrides its constants or ranges."""
    from attn_ops.backends.mla.triton.decode import mla_decode

    common, shape = layers.common, layers.shape

    def attend(layer: int) -> torch.Tensor:
        return mla_decode(
            layers.ql_nope[layer], layers.q_pe(layer), layers.caches[layer],
            common.block_table_tensor, common.seq_lens, common.query_start_loc,
            scale=shape.scale, max_query_len=shape.query_len, max_seq_len=shape.context,
            kv_scale=layers.kv_scale, fp8=shape.fp8, **choice,
        )  # fmt: skip

    return attend


def triton_mla_project(layers: Layers, **choice: Any) -> Attend:
    """The same with the product by W_UV in the merging kernel: [T, N, V]."""
    from attn_ops.backends.mla.triton.project import mla_decode_project

    common, shape = layers.common, layers.shape

    def attend(layer: int) -> torch.Tensor:
        return mla_decode_project(
            layers.ql_nope[layer], layers.q_pe(layer), layers.caches[layer],
            common.block_table_tensor, common.seq_lens, common.query_start_loc,
            layers.w_uv(layer), scale=shape.scale, max_query_len=shape.query_len,
            max_seq_len=shape.context, kv_scale=layers.kv_scale, fp8=shape.fp8, **choice,
        )  # fmt: skip

    return attend


def _plain(layers: Layers, library: str) -> None:
    if layers.shape.fp8 is not None:
        raise ValueError(f"kv_cache_dtype must be auto: {library} takes no FP8 cache beside bf16 q")


def flashinfer(layers: Layers, backend: str) -> Attend:
    """`BatchMLAPagedAttentionWrapper`, with buffers as a captured step needs them."""
    library = importlib.import_module("flashinfer.mla")
    _plain(layers, "FlashInfer")
    common, shape, device = layers.common, layers.shape, layers.device
    pages = -(-shape.context // shape.block_size)
    starts = torch.arange(shape.num_reqs + 1, dtype=torch.int32)
    indices = common.block_table_tensor[:, :pages].contiguous().flatten()
    lengths = torch.full((shape.num_reqs,), shape.context, dtype=torch.int32)
    wrapper = library.BatchMLAPagedAttentionWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device=device), use_cuda_graph=True,
        qo_indptr=common.query_start_loc.clone(), kv_indptr=(starts * pages).to(device),
        kv_indices=indices.clone(), kv_len_arr=lengths.to(device), backend=backend,
    )  # fmt: skip
    one = shape.latent
    wrapper.plan(
        starts * shape.query_len, starts * pages, indices, lengths, shape.heads, one.kv_lora_rank,
        one.qk_rope_head_dim, shape.block_size, shape.query_len > 1, shape.scale,
        torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    rank = one.kv_lora_rank

    def attend(layer: int) -> torch.Tensor:
        cache = layers.caches[layer]
        return wrapper.run(
            layers.ql_nope[layer].contiguous(), layers.q_pe(layer).contiguous(),
            cache[:, :, :rank], cache[:, :, rank:],
        )  # fmt: skip

    return attend


def flash_attn(layers: Layers) -> Attend:
    """FA3 with `q_v`: the rotated part is its head, the latent its value."""
    library = vllm_flash_attn()
    _plain(layers, "FA3")
    common, shape, one = layers.common, layers.shape, layers.shape.latent
    plan = library.get_scheduler_metadata(
        batch_size=shape.num_reqs, max_seqlen_q=shape.query_len, max_seqlen_k=shape.context,
        num_heads_q=shape.heads, num_heads_kv=1, headdim=one.qk_rope_head_dim,
        headdim_v=one.kv_lora_rank, cache_seqlens=common.seq_lens, qkv_dtype=torch.bfloat16,
        cu_seqlens_q=common.query_start_loc, page_size=shape.block_size, causal=True,
    )  # fmt: skip
    rank = one.kv_lora_rank

    def attend(layer: int) -> torch.Tensor:
        cache = layers.caches[layer].unsqueeze(2)
        return library.flash_attn_varlen_func(
            q=layers.q_pe(layer), k=cache[..., rank:], v=cache[..., :rank],
            q_v=layers.ql_nope[layer], max_seqlen_q=shape.query_len,
            cu_seqlens_q=common.query_start_loc, max_seqlen_k=shape.context,
            seqused_k=common.seq_lens, block_table=common.block_table_tensor,
            softmax_scale=shape.scale, causal=True, fa_version=3, scheduler_metadata=plan,
        )  # fmt: skip

    return attend


def flash_mla(layers: Layers) -> Attend:
    """FlashMLA, its own or vLLM's copy; pages of 64 tokens."""
    try:
        library = importlib.import_module("flash_mla")
    except ImportError:
        library = importlib.import_module("vllm.v1.attention.ops.flashmla")
    _plain(layers, "FlashMLA")
    common, shape, rank = layers.common, layers.shape, layers.shape.latent.kv_lora_rank
    plan = library.get_mla_metadata(common.seq_lens, shape.query_len * shape.heads, 1)

    def attend(layer: int) -> torch.Tensor:
        q = torch.cat([layers.ql_nope[layer], layers.q_pe(layer)], 2)
        out, _ = library.flash_mla_with_kvcache(
            q.view(shape.num_reqs, shape.query_len, shape.heads, -1),
            layers.caches[layer].unsqueeze(2), common.block_table_tensor, common.seq_lens, rank,
            plan[0], plan[1], softmax_scale=shape.scale, causal=True,
        )  # fmt: skip
        return out.flatten(0, 1)

    return attend


DIRECT: dict[str, Callable[[Layers], Attend]] = {
    "TRITON_MLA": triton_mla,
    "FLASHINFER_MLA fa2": functools.partial(flashinfer, backend="fa2"),
    "FLASHINFER_MLA fa3": functools.partial(flashinfer, backend="fa3"),
    "FLASH_ATTN_MLA": flash_attn,
    "FLASHMLA": flash_mla,
}
"""By backend: attention over the latents alone."""
