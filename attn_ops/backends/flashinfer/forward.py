"""Attention by the wrappers that a step's metadata has planned.

T tokens, L rows of requests that have tokens in the cache, S requests, N query heads, K kv heads,
H head size, P blocks, B block size.
"""

import dataclasses
import math

import torch

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.flashinfer.builder import Plan
from attn_ops.backends.flashinfer.wrappers import Kind, Wrapper
from attn_ops.metadata import AttentionMetadata, AttentionSpec, kv_dtype_of


def forward(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
    plan: Plan | None = None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H].

    The cache may be strided, heads before tokens too: the kernels take the strides of pages, tokens
    and heads as they are.

    Raises:
        ValueError: the metadata has no plan for the layer, or the cache's heads are not contiguous.
    """
    if plan is None:
        plan = plan_of(meta, options.spec(q, kv_cache, meta.common.causal))
    if kv_cache.stride(4) != 1:
        raise ValueError(f"stride of kv_cache's last dimension must be 1, got {kv_cache.stride(4)}")
    fp8 = kv_dtype_of(options.kv_cache_dtype)
    if fp8 is None and options.lse is None and _takes_all_rows(plan, q):
        return _run_all(plan.wrappers[0][1], q, kv_cache, options.scale)
    if fp8 is None:
        options = dataclasses.replace(options, k_scale=None, v_scale=None)  # of FP8 caches only
    else:
        kv_cache = kv_cache.view(fp8)
    return _forward_rows(plan, q, kv_cache, options)


def _takes_all_rows(plan: Plan, q: torch.Tensor) -> bool:
    """Whether one wrapper computes all rows of q."""
    return plan.rows is None and len(plan.wrappers) == 1 and q.shape[0] == plan.num_rows


def _run_all(
    wrapper: Wrapper, q: torch.Tensor, kv_cache: torch.Tensor, scale: float
) -> torch.Tensor:
    """One call of the library and no view.

    By way of `_forward_rows`, and with a spec made for every call, the operator took 71 us of the
    host where the library took 21 (one H200, 2026-11-21). A decode wrapper allocates [T, N, H]
    itself, unchecked; a prefill wrapper would clear it too.
    """
    out_TNH = None
    if wrapper.kind is not Kind.DECODE:
        out_TNH = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return wrapper.run(_loadable(q), kv_cache, q_scale=scale, out=out_TNH)


def _forward_rows(
    plan: Plan, q: torch.Tensor, kv_cache: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """`forward` of any batch; rows of no request with tokens become zero."""
    lse_TN = options.lse
    out_TNH = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.rows is None:
        end = plan.num_rows
        _run(plan, q[:end], kv_cache, options, out_TNH[:end], _rows(lse_TN, slice(end)))
        if end < q.shape[0]:
            out_TNH[end:].zero_()
            if lse_TN is not None:
                lse_TN[end:].fill_(-math.inf)
        return out_TNH
    q_LNH = q.index_select(0, plan.rows)
    out_LNH = torch.empty_like(q_LNH)
    lse_LN = None if lse_TN is None else lse_TN.new_empty(q_LNH.shape[:2])
    _run(plan, q_LNH, kv_cache, options, out_LNH, lse_LN)
    out_TNH.zero_().index_copy_(0, plan.rows, out_LNH)
    if lse_TN is not None and lse_LN is not None:
        lse_TN.fill_(-math.inf).index_copy_(0, plan.rows, lse_LN)
    return out_TNH


def _run(
    plan: Plan,
    q_LNH: torch.Tensor,
    kv_cache: torch.Tensor,
    options: AttentionOptions,
    out_LNH: torch.Tensor,
    lse_LN: torch.Tensor | None,
) -> None:
    """Compute the rows of requests with tokens, each part by its wrapper."""
    if not plan.wrappers:
        return
    q_LNH = _loadable(_scaled(q_LNH, options.k_scale))
    for rows, wrapper in plan.wrappers:
        wrapper.run(
            q_LNH[rows],
            kv_cache,
            q_scale=options.scale,
            out=out_LNH[rows],
            lse=_rows(lse_LN, rows),
            return_lse=lse_LN is not None,
        )
    if options.v_scale is not None:
        out_LNH.mul_(options.v_scale)
    if lse_LN is not None:
        lse_LN.mul_(math.log(2))  # FlashInfer's is to base 2: log2(d) + m in its kernels
        if plan.captured is not None:
            lse_LN.masked_fill_(plan.captured.is_empty, -math.inf)  # FlashInfer's is finite there


def plan_of(meta: AttentionMetadata, spec: AttentionSpec) -> Plan:
    """The plan of layers of geometry `spec`.

    Raises:
        ValueError: the builder was not given such a layer.
    """
    plan = meta.planned(spec)
    if plan is None:
        planned = ", ".join(map(str, meta.plans)) or "none"
        raise ValueError(f"layer must have been planned by the builder, got {spec}; {planned}")
    return plan


def _rows(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows]


def _scaled(q: torch.Tensor, k_scale: torch.Tensor | None) -> torch.Tensor:
    """q * k_scale, a product in float32 rounded once to q's dtype.

    FlashInfer takes k_scale as a float of the host, and reading ours would wait for the device.
    The rounding is as large as q's own, 2^-9 of an element in bfloat16 and 2^-12 in float16, and
    none for powers of two; in float16 the product must stay in range.
    """
    if k_scale is None:
        return q
    scaled = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return torch.mul(q.detach(), k_scale, out=scaled)


def _loadable(q: torch.Tensor) -> torch.Tensor:
    """q, or a copy: the kernels load a head in pieces of 16 bytes, FA3 by tensor maps."""
    row, head, element = q.stride()
    if element == 1 and not (q.data_ptr() | row * q.itemsize | head * q.itemsize) % 16:
        return q
    return q.clone(memory_format=torch.contiguous_format)
