"""Attention libraries called by hand, as `benchmarks.attention` compares the operator with them.

Each function plans outside the graph what the library plans, and gives back a call of one layer.
All requests of a batch are equal. Where a library reads no paged cache, the gather of the keys is
part of the call: without it there is nothing to attend to.

T tokens, N query heads, K kv heads, G = N // K, H head size, P blocks, B block size, S requests,
Q queries and C cached tokens of each request, M blocks of each request.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.flash_attn.library import LIBRARIES, fa_version, found_library
from attn_ops.backends.measure import Layers
from attn_ops.backends.xformers_backend import operator
from attn_ops.metadata import KV_CACHE_DTYPES

Attend = Callable[[int], torch.Tensor]
"""Attention of one layer, by its index: [T, N, H], or a view of as many elements."""


def stored(layers: Layers, layer: int) -> torch.Tensor:
    """[P, 2, B, K, H] in the dtype that the cache means."""
    fp8 = KV_CACHE_DTYPES[layers.spec.kv_cache_dtype]
    return layers.caches[layer] if fp8 is None else layers.caches[layer].view(fp8)


def pages(layers: Layers) -> torch.Tensor:
    """[S, M] int32: the blocks that hold tokens."""
    width = -(-layers.common.max_seq_len // layers.block_size)
    return layers.common.block_table_tensor[:, :width].contiguous()


def gathered(
    layers: Layers, layer: int, blocks_SM: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values out of their pages, each [S, C, K, H] in q's dtype."""
    cache, num_reqs = stored(layers, layer), blocks_SM.shape[0]
    found = []
    for part in range(2):
        pages_BKH = cache[:, part][blocks_SM.flatten()]
        rows_SCKH = pages_BKH.view(num_reqs, -1, *pages_BKH.shape[2:])
        found.append(rows_SCKH[:, : layers.common.max_seq_len].to(layers.spec.dtype))
    return found[0], found[1]


def vllm_flash_attn() -> Any:
    """vLLM's FlashAttention under either of its names.

    Raises:
        ImportError: there is none with kernels for this GPU.
    """
    if fa_version() is None:
        raise ImportError(f"no {' or '.join(LIBRARIES[:2])} with kernels for this GPU")
    return found_library()[1]


def flash_attn(layers: Layers, captured: bool) -> Attend:
    """vLLM's FlashAttention, FA3 where it runs; with an FP8 cache it wants q in FP8
    too, which is one more kernel in the call: a cast, and scales of 1."""
    library = vllm_flash_attn()
    spec, common = layers.spec, layers.common
    fa3 = library.is_fa_version_supported(3)
    dtype = stored(layers, 0).dtype
    shared: dict[str, Any] = {"fa_version": 3 if fa3 else 2}
    if fa3:
        shared["scheduler_metadata"] = library.get_scheduler_metadata(
            batch_size=common.num_reqs, max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len, num_heads_q=spec.num_heads,
            num_heads_kv=spec.num_kv_heads, headdim=spec.head_size, cache_seqlens=common.seq_lens,
            qkv_dtype=dtype, cu_seqlens_q=common.query_start_loc, page_size=layers.block_size,
            causal=True,
        )  # fmt: skip
    if dtype != spec.dtype:
        ones = torch.ones(common.num_reqs, spec.num_kv_heads, device=common.device)
        shared |= {"q_descale": ones, "k_descale": ones, "v_descale": ones}

    def attend(layer: int) -> torch.Tensor:
        cache = stored(layers, layer)
        return library.flash_attn_varlen_func(
            layers.queries[layer].to(dtype), cache[:, 0], cache[:, 1],
            common.max_query_len, common.query_start_loc, common.max_seq_len,
            seqused_k=common.seq_lens, block_table=common.block_table_tensor,
            softmax_scale=layers.scale, causal=True, **shared,
        )  # fmt: skip

    return attend


def triton(layers: Layers, captured: bool) -> Attend:
    """The launcher itself: TRITON's kernels are this project's, there is no library under them."""
    if layers.common.max_query_len == 1:
        from attn_ops.backends.triton.decode import decode_attention as launch
    else:
        from attn_ops.backends.triton.prefill import prefill_attention as launch
    options = AttentionOptions(layers.scale, **layers.options)
    return lambda layer: launch(layers.queries[layer], layers.caches[layer], layers.common, options)


def flashinfer(layers: Layers, captured: bool) -> Attend:
    """A wrapper of FlashInfer, planned on the host; its own buffers where a graph is captured."""
    library = importlib.import_module("flashinfer")
    spec, common = layers.spec, layers.common
    blocks_SM = pages(layers)
    (num_reqs, width), device = blocks_SM.shape, common.device
    counts = torch.arange(num_reqs + 1, dtype=torch.int32)
    last = torch.full((num_reqs,), (common.max_seq_len - 1) % layers.block_size + 1).int()
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    indices = blocks_SM.flatten()
    buffers = [(counts * width).to(device), indices.clone(), last.to(device)]
    shared = {
        "num_qo_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads,
        "page_size": layers.block_size, "q_data_type": spec.dtype,
        "kv_data_type": stored(layers, 0).dtype, "sm_scale": layers.scale,
    }  # fmt: skip
    if common.max_query_len == 1:
        names = (
            "paged_kv_indptr_buffer",
            "paged_kv_indices_buffer",
            "paged_kv_last_page_len_buffer",
        )
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=captured,
            use_tensor_cores=spec.num_heads // spec.num_kv_heads >= 4,
            **(dict(zip(names, buffers, strict=True)) if captured else {}),
        )  # fmt: skip
        wrapper.plan(counts * width, indices, last, head_dim=spec.head_size, **shared)
    else:
        names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        own = dict(zip(names, buffers, strict=True)) | {
            "qo_indptr_buf": common.query_start_loc.clone()
        }
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=captured, **(own if captured else {})
        )
        wrapper.plan(
            counts * common.max_query_len, counts * width, indices, last,
            head_dim_qk=spec.head_size, causal=True, **shared,
        )  # fmt: skip
    return lambda layer: wrapper.run(layers.queries[layer], stored(layers, layer))


def xformers(layers: Layers, captured: bool) -> Attend:
    """xFormers: split keys over the pages for decodes; for a prefill, whose queries that kernel
    refuses, the operator of its choice over gathered keys, where its C++ extension loads."""
    fmha = importlib.import_module("xformers.ops.fmha")
    if layers.spec.kv_cache_dtype != "auto":
        raise ValueError(
            "kv_cache_dtype must be auto: xFormers reads no E4M3 cache without row scales"
        )
    if layers.common.max_query_len == 1:
        return _xformers_decode(fmha, layers)
    spec, blocks_SM = layers.spec, pages(layers)
    group = spec.num_heads // spec.num_kv_heads
    bias = fmha.attn_bias.LowerTriangularFromBottomRightMask()

    def attend(layer: int) -> torch.Tensor:
        q = layers.queries[layer].view(
            layers.common.num_reqs, -1, spec.num_kv_heads, group, spec.head_size
        )
        k, v = (
            x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in gathered(layers, layer, blocks_SM)
        )
        return fmha.memory_efficient_attention_forward(q, k, v, bias, scale=layers.scale)

    return attend


def _xformers_decode(fmha: Any, layers: Layers) -> Attend:
    """The whole cache as pages of B rows: keys in the even ones, values one page further on."""
    spec, common, size = layers.spec, layers.common, layers.block_size
    # Its tile must divide a page, and it must not be refused for a C++ extension it does not use.
    op, _ = operator(size)
    bias = fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [1] * common.num_reqs, [common.max_seq_len] * common.num_reqs,
        pages(layers) * 2, size, device=common.device,
    )  # fmt: skip
    group = spec.num_heads // spec.num_kv_heads

    def attend(layer: int) -> torch.Tensor:
        flat = layers.caches[layer].view(1, -1, spec.num_kv_heads, 1, spec.head_size)
        flat = flat.expand(-1, -1, -1, group, -1)
        q = layers.queries[layer].view(1, -1, spec.num_kv_heads, group, spec.head_size)
        return fmha.memory_efficient_attention_forward(
            q, flat[:, :-size], flat[:, size:], bias, scale=layers.scale, op=op
        )

    return attend


def flex(layers: Layers, captured: bool) -> Attend:
    """Compiled FlexAttention with a block mask over gathered keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    spec, common, blocks_SM = layers.spec, layers.common, pages(layers)
    offset = common.max_seq_len - common.max_query_len

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query + offset

    mask = create_block_mask(
        visible, None, None, common.max_query_len, common.max_seq_len, device=common.device.type
    )
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(layer: int) -> torch.Tensor:
        q = layers.queries[layer].view(common.num_reqs, -1, spec.num_heads, spec.head_size)
        k, v = (x.transpose(1, 2) for x in gathered(layers, layer, blocks_SM))
        out = compiled(
            q.transpose(1, 2), k, v, block_mask=mask, scale=layers.scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    return attend


DIRECT: dict[str, Callable[[Layers, bool], Attend]] = {
    "FLASH_ATTN": flash_attn,
    "TRITON": triton,
    "FLASHINFER": flashinfer,
    "XFORMERS": xformers,
    "FLEX": flex,
}
"""By backend; one that is not here has no counterpart."""
