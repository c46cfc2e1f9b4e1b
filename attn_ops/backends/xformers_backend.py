"""XFORMERS: short queries by xFormers' split-K operator over paged keys, the rest by Triton.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| cuda, sm_80+ | fp16, bf16 | 32-256 by 8 | 16-256 by 16 | yes | yes | single-token decodes |

Also FP8 caches, non-causal batches and the log-sum-exp. xFormers 0.0.35 or later.

Single-token queries in front of the batch, and causal batches of queries of one length up to 16,
go to `xformers.ops.fmha.triton_splitk`. Prefills, and layers with a window, a soft cap, an FP8
cache or a head size that it has no kernel for (it has 32, 64, 128 and 256), go to our own Triton
kernels, which are shared code and not the TRITON backend: attn_ops/backends/triton/prefill.py and
decode.py. Layers without anything for xFormers to do should name TRITON.

The operator reads page p of keys from rows p * B of one tensor. Blocks of our cache lie further
apart, as values or other heads stand between them: a block is some number of pages, and the block
table is multiplied with it once a step. Keys and values are loaded with a check against the
request's length and no padding value, which Triton documents as undefined and fills with zeros: a
NaN in a block behind the last token stays out. A request of length 0 gives zeros.

All it reads of a batch is on the device: lengths, table, queries. So single-token decodes may be
captured. Its kernel is compiled for each number of requests and each table width, which is
therefore a power of two. It is a CUDA backend: on a CPU the operator refuses to run, though
Triton's interpreter can be brought to it (tests/attn_ops/backends/test_xformers.py).

T tokens, S requests, D of them computed by xFormers, L query rows of each, N query heads, K kv
heads, G = N // K, H head size, P blocks, B block size, M blocks a request may own.
"""

import dataclasses
import functools
import importlib
import importlib.util
import math
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.backends.triton import check_e4m3
from attn_ops.integers import next_power_of_2
from attn_ops.metadata import (
    KV_CACHE_DTYPES,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
    Views,
)

OLDEST = (0, 0, 35)
"""The version whose sources this is written against; earlier ones also want an older torch."""

HEAD_SIZES = (32, 64, 128, 256)
"""That the operator has kernels for."""

MAX_QUERY_LEN = 16
"""Rows of a request that the operator masks causally."""


# Cached: to find a package and its version takes 2.8 ms (a CPU, 2026-11-22); each selection asks.
@functools.cache
def unavailable() -> str | None:
    """Asks for the package without importing it: the import takes seconds."""
    if not torch.cuda.is_available():
        return "a CUDA device must be present, got none"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"the GPU must be sm_80 or later, got {torch.cuda.get_device_name()}"
    try:
        installed = version("xformers")
    except PackageNotFoundError:
        installed = None
    if installed is None or importlib.util.find_spec("xformers") is None:
        return "xformers must be installed, got none"
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"xformers must be {oldest} or later, got {installed}"
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What the layers of one geometry share over a step."""

    num_requests: int  # D: the first ones, by xFormers
    query_len: int  # L: rows of each of them; 0 if there are none
    rest: CommonAttentionMetadata | None  # the others; None: they have no rows
    seq_lens: torch.Tensor  # [D] int32, device
    table: torch.Tensor  # [D, M] int32, device; M is a power of two, or all there are
    biases: dict[int, Any]  # xFormers' description of the D requests, by pages a block

    @property
    def num_rows(self) -> int:
        return self.num_requests * self.query_len


class XFormersMetadataBuilder(AttentionMetadataBuilder):
    """Finds which requests xFormers computes: a `Plan` per geometry.

    A batch whose query lengths are not on the host is xFormers' if it can only be single tokens.
    """

    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def _planned(
        self,
        specs: Sequence[AttentionSpec],
        common: CommonAttentionMetadata,
        views: Views | None = None,
    ) -> AttentionMetadata:
        """A plan for layers that xFormers is able to take, and one for all others."""
        plans = {able: make_plan(able, common, self.block_size) for able in {*map(is_able, specs)}}
        return AttentionMetadata(common, self.backend, plans, self.block_size, views=views)


def is_able(spec: AttentionSpec) -> bool:
    """Whether xFormers' operator can take any query of such a layer."""
    plain = spec.sliding_window is None and spec.soft_cap is None
    return plain and spec.kv_cache_dtype == "auto" and spec.head_size in HEAD_SIZES


def plan_of(meta: AttentionMetadata, spec: AttentionSpec) -> Plan:
    """The plan of layers of geometry `spec`; made now, where the builder was given none like it."""
    able, block_size = is_able(spec), meta.block_size
    if able in meta.plans:
        return meta.plans[able]
    if block_size is None:
        raise ValueError(
            "attn_metadata must know its block_size with XFORMERS, got None; build it by the "
            "backend's builder"
        )
    return meta.once(("plan", able), lambda: make_plan(able, meta.common, block_size))


def make_plan(able: bool, common: CommonAttentionMetadata, block_size: int) -> Plan:
    num_requests, query_len = leading_queries(common) if able else (0, 0)
    rows = num_requests * query_len
    blocks = -(-common.max_seq_len // block_size)
    width = next_power_of_2(blocks)
    return Plan(
        num_requests,
        query_len,
        _behind(common, num_requests, rows) if rows < common.num_actual_tokens else None,
        common.seq_lens[:num_requests],
        common.block_table_tensor[:num_requests, :width],
        {},
    )


def leading_queries(common: CommonAttentionMetadata) -> tuple[int, int]:
    """(D, L): requests in front that the operator takes at once, and the query rows of each."""
    if common.num_reqs == 0:
        return 0, 0
    starts = common.query_start_loc_cpu
    padded = common.num_actual_tokens == common.num_reqs
    if starts is None:  # max_query_len bounds all lengths
        return (common.num_reqs, 1) if padded and common.max_query_len <= 1 else (0, 0)
    lengths = starts.diff()
    longest = int(lengths[0])
    if 1 < longest <= MAX_QUERY_LEN and common.causal and bool((lengths == longest).all()):
        return common.num_reqs, longest
    others = (lengths != 1).nonzero()
    first = int(others[0]) if others.numel() else common.num_reqs
    if padded and not lengths[first:].any():  # padding requests own the rows that are counted
        first = common.num_reqs
    return first, 1


def _behind(common: CommonAttentionMetadata, first: int, rows: int) -> CommonAttentionMetadata:
    """The batch from request `first` on, which begins at row `rows`."""
    if first == 0:
        return common
    return CommonAttentionMetadata(
        query_start_loc=common.query_start_loc[first:] - rows,
        query_start_loc_cpu=None,
        seq_lens=common.seq_lens[first:],
        num_reqs=common.num_reqs - first,
        num_actual_tokens=common.num_actual_tokens - rows,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        block_table_tensor=common.block_table_tensor[first:],
        slot_mapping=common.slot_mapping[rows:],
        causal=common.causal,
        block_size=common.block_size,
    )


def forward(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
    plan: Plan | None = None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H].

    Raises:
        ValueError: blocks of the cache are no whole number of pages apart, or heads not contiguous.
    """
    for name, x in (("q", q), ("kv_cache", kv_cache)):
        if x.stride(-1) != 1:
            raise ValueError(f"stride of {name}'s last dimension must be 1, got {x.stride(-1)}")
    check_e4m3(options.kv_cache_dtype, q.device)
    if plan is None:
        plan = plan_of(meta, options.spec(q, kv_cache, meta.common.causal))
    rows = plan.num_rows
    if rows == 0:
        return _by_triton(q, kv_cache, meta.common, options)
    decoded_RNH = _by_xformers(q[:rows], kv_cache, plan, options)
    if rows == q.shape[0]:
        return decoded_RNH
    out_TNH = torch.empty_like(q, memory_format=torch.contiguous_format)
    out_TNH[:rows] = decoded_RNH
    lse_TN = None if options.lse is None else options.lse[rows:]
    if plan.rest is None:
        out_TNH[rows:].zero_()
        if lse_TN is not None:
            lse_TN.fill_(-math.inf)
    else:
        asked = dataclasses.replace(options, lse=lse_TN)
        out_TNH[rows:] = _by_triton(q[rows:], kv_cache, plan.rest, asked)
    return out_TNH


def _by_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """The kernels that TRITON launches, which are no backend of their own."""
    if q.shape[0] == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if common.max_query_len <= 1:
        from attn_ops.backends.triton.decode import decode_attention as attend
    else:
        from attn_ops.backends.triton.prefill import prefill_attention as attend
    with torch.cuda.device_of(q):
        return attend(q, kv_cache, common, options)


def _by_xformers(
    q_RNH: torch.Tensor, kv_cache: torch.Tensor, plan: Plan, options: AttentionOptions
) -> torch.Tensor:
    """The first R = D * L rows; writes their part of `options.lse`.

    The operator is applied itself. What `memory_efficient_attention_forward` does before is to look
    for an operator and to validate, which the builder and our operator have done.
    """
    num_rows, num_heads, head_size = q_RNH.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    k, v, pages = page_views(kv_cache, group)
    splitk, inputs = operator(block_size)
    q = q_RNH.view(1, num_rows, num_kv_heads, group, head_size)
    asked = inputs(q, k, v, _bias(plan, block_size, pages), scale=options.scale)
    lse = options.lse
    with torch.cuda.device_of(q_RNH):
        out, context = splitk.apply(asked, needs_gradient=lse is not None)
    if lse is not None:
        lse[:num_rows] = context.lse.reshape(num_heads, num_rows).t()
    return out.reshape(num_rows, num_heads, head_size)


def page_views(kv_cache: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values as the operator wants them, [1, rows, K, G, H], and the pages of a block.

    Row r of page p is p * B + r, rows a token's stride apart; one block begins where page
    `block * pages` does. Of the other pages, which hold values or other heads, none is asked for.
    """
    num_blocks, _, block_size, num_kv_heads, head_size = kv_cache.shape
    stride_block, stride_kind, stride_token, stride_head, last = kv_cache.stride()
    pages, left = divmod(stride_block, stride_token * block_size)
    if left or last != 1:
        raise ValueError(
            "kv_cache must have contiguous heads and blocks a multiple of block_size tokens apart, "
            f"got strides {kv_cache.stride()}; supported: NHD and HND"
        )
    num_rows = ((num_blocks - 1) * pages + 1) * block_size
    shape = (1, num_rows, num_kv_heads, group, head_size)
    strides = (0, stride_token, stride_head, 0, 1)
    first = kv_cache.storage_offset()
    k, v = (kv_cache.as_strided(shape, strides, first + i * stride_kind) for i in (0, 1))
    return k, v, pages


# Cached: the class is the identity of an operator to xFormers; one for each block size.
@functools.cache
def operator(block_size: int) -> tuple[type, type]:
    """xFormers' split-K operator for pages of a block's size, and the type of its inputs.

    The operator's key tiles must divide a page. It is Triton alone, but xFormers refuses all of its
    operators where its C++ extension was built for another torch and does not load; for callers by
    hand, who are checked, that one reason is left out.
    """
    splitk = importlib.import_module("xformers.ops.fmha.triton_splitk")

    class PagedSplitK(splitk.FwOp):
        BLOCK_N = min(splitk.FwOp.BLOCK_N, block_size & -block_size)  # a power of two
        NAME = f"paged_splitK_{BLOCK_N}"

        @classmethod
        def not_supported_reasons(cls, d: Any) -> list[str]:
            reasons = super().not_supported_reasons(d)
            return [r for r in reasons if r != "xFormers wasn't build with CUDA support"]

    return PagedSplitK, splitk.Inputs


def _bias(plan: Plan, block_size: int, pages: int) -> Any:
    """The operator's description of the requests; nothing is uploaded and nothing read back.

    xFormers' own constructor uploads lists of lengths. What the operator's host code reads is the
    number of rows and requests; lengths in its lists are upper bounds here.
    """
    if pages in plan.biases:
        return plan.biases[pages]
    module = importlib.import_module("xformers.ops.fmha.attn_bias")
    count, query_len = plan.num_requests, plan.query_len
    room = plan.table.shape[1] * block_size
    starts = torch.arange(
        0, plan.num_rows + 1, query_len, dtype=torch.int32, device=plan.table.device
    )
    bias = module.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(
        q_seqinfo=module._SeqLenInfo(
            seqstart=starts,
            max_seqlen=query_len,
            min_seqlen=query_len,
            seqstart_py=list(range(0, plan.num_rows + 1, query_len)),
        ),
        k_seqinfo=module._PaddedSeqLenInfo(
            seqstart=starts,  # not read: pages say where keys begin
            max_seqlen=room,
            min_seqlen=room,
            seqstart_py=list(range(0, count * room + 1, room)),
            seqlen=plan.seq_lens,
            seqlen_py=[room] * count,
            padding=room,
        ),
        block_tables=plan.table * pages,
        page_size=block_size,
    )
    plan.biases[pages] = bias
    return bias


BACKEND = Backend(
    name="XFORMERS",
    support=Support(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_sizes=tuple(range(32, 257, 8)),
        block_sizes=tuple(range(16, 257, 16)),
        sliding_window=True,
        soft_cap=True,
        cudagraph=AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        kv_cache_dtypes=tuple(KV_CACHE_DTYPES),
        non_causal=True,
        lse=True,
    ),
    builder=XFormersMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
    plan_of=plan_of,
)
