"""FLASHINFER: FlashInfer's paged decode and prefill wrappers, planned on the host once a step.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| cuda, sm_80+ | fp16, bf16 | 64, 128 | 16 | yes | yes | never |

Other head and block sizes and the log-sum-exp, which `forward` writes, are not declared until their
tests have run on a GPU (docs/gpu_runs.md).

No CUDA graph, because `plan()` is host code that a replay would not run.

Single-token queries in front of the batch go to the decode wrapper, the rest to the prefill
wrapper: FA3 kernels on sm_90, FA2 elsewhere. `parts` finds which request goes where, `wrappers`
holds FlashInfer's objects. FlashInfer is imported when the first batch is planned, and compiles its
kernels then unless `flashinfer-jit-cache` holds them.

An FP8 cache is not declared: the wrappers take k_scale as a float of the host, ours is on the
device, and scaling q instead would round it.

T tokens, L rows of requests that have tokens in the cache, N query heads, K kv heads, H head size,
P blocks, B block size.
"""

import dataclasses
import functools
import importlib.util
import math
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.backends.flashinfer.parts import Part, divide, page_indices
from attn_ops.backends.flashinfer.wrappers import WORKSPACE_BYTES, Kind, Wrapper, Wrappers
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
)

OLDEST = (0, 6, 8)
"""The version whose sources this is written against; `run(q_scale=)` must reach both wrappers."""


@functools.cache
def unavailable() -> str | None:
    """Asks for the package without importing it: the import takes seconds."""
    if not torch.cuda.is_available():
        return "a CUDA device must be present, got none"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"the GPU must be sm_80 or later, got {torch.cuda.get_device_name()}"
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        installed = None
    if installed is None or importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python must be installed, got none"
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"flashinfer-python must be {oldest} or later, got {installed}"
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What the layers of one geometry share over a step."""

    num_rows: int  # rows of requests with tokens, L
    rows: torch.Tensor | None  # [L] int64, device: those rows; None: they are the first ones
    wrappers: tuple[tuple[slice, Wrapper], ...]  # which of the L rows each wrapper computes


class FlashInferMetadataBuilder(AttentionMetadataBuilder):
    """Plans the wrappers: a `Plan` per geometry. Needs query_start_loc_cpu and seq_lens_cpu.

    Args:
        workspace_bytes: at least so many bytes for partial results, allocated with the first plan;
            the other arguments are `AttentionMetadataBuilder`'s.
    """

    cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = 1

    def __init__(
        self, *arguments: Any, workspace_bytes: int = WORKSPACE_BYTES, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._wrappers = Wrappers(self.specs, workspace_bytes)

    def plan(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> Plan:
        division = divide(common, self.block_size)
        indices = page_indices(common, division.num_pages, self.block_size)
        rows = division.row_indices
        if rows is not None:
            rows = torch.from_numpy(rows).to(common.device, non_blocking=True)
        parts = {Kind.of_decodes(spec): division.decodes, Kind.PREFILL: division.prefills}
        taken: dict[Kind, Wrapper] = {}
        computed = []
        for kind, part in parts.items():
            if part is None:
                continue
            with torch.cuda.device_of(indices):
                wrapper = taken[kind] = self._wrappers.take(kind, common.device)
                wrapper.plan(**_arguments(kind, spec, part, indices[part.pages], self.block_size))
            computed.append((part.rows, wrapper))
        plan = Plan(division.num_rows, rows, tuple(computed))
        self._wrappers.lend(taken, plan)
        return plan


def _arguments(
    kind: Kind, spec: AttentionSpec, part: Part, indices: torch.Tensor, block_size: int
) -> dict[str, Any]:
    """Keywords of a wrapper's `plan`; the two wrappers have different names for the same things."""
    shared = {
        "num_qo_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "page_size": block_size,
        "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
        "logits_soft_cap": spec.soft_cap,
        "q_data_type": spec.dtype,
        "kv_data_type": spec.dtype,
        # A spec has no scale: layers of one geometry may differ in it. `run` multiplies this one
        # by its q_scale, so 1 leaves the scale to `forward`.
        "sm_scale": 1.0,
        "seq_lens": part.seq_lens,
    }
    if kind is not Kind.PREFILL:
        return shared | {
            "indptr": part.page_start_loc,
            "indices": indices,
            "last_page_len": part.last_page_len,
            "head_dim": spec.head_size,
        }
    return shared | {
        "qo_indptr": part.query_start_loc,
        "paged_kv_indptr": part.page_start_loc,
        "paged_kv_indices": indices,
        "paged_kv_last_page_len": part.last_page_len,
        "head_dim_qk": spec.head_size,
        "causal": True,
        "max_token_per_sequence": int(part.query_start_loc.diff().max()),
    }


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H].

    Raises:
        ValueError: the metadata has no plan for the layer, or the cache's heads are not contiguous.
    """
    plan = _plan_of(meta, options.spec(q, kv_cache, meta.common.causal))
    if kv_cache.stride(4) != 1:
        raise ValueError(f"stride of kv_cache's last dimension must be 1, got {kv_cache.stride(4)}")
    lse_TN = options.lse
    out_TNH = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.rows is None:
        end = plan.num_rows
        _run(plan, q[:end], kv_cache, options, out_TNH[:end], _rows(lse_TN, slice(end)))
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
    if plan.wrappers:
        q_LNH = _loadable(q_LNH)
    for rows, wrapper in plan.wrappers:
        wrapper.run(
            q_LNH[rows],
            kv_cache,
            q_scale=options.scale,
            out=out_LNH[rows],
            lse=_rows(lse_LN, rows),
            return_lse=lse_LN is not None,
        )
    if lse_LN is not None:
        lse_LN.mul_(math.log(2))  # FlashInfer's is to base 2: log2(d) + m in its kernels


def _plan_of(meta: AttentionMetadata, spec: AttentionSpec) -> Plan:
    if spec not in meta.plans:
        planned = ", ".join(map(str, meta.plans)) or "none"
        raise ValueError(f"layer must have been planned by the builder, got {spec}; {planned}")
    return meta.plans[spec]


def _rows(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows]


def _loadable(q: torch.Tensor) -> torch.Tensor:
    """q, or a copy: the kernels load a head in pieces of 16 bytes, FA3 by tensor maps."""
    strides = [stride * q.itemsize for stride in q.stride()[:2]]
    if q.stride(2) == 1 and not any(n % 16 for n in (q.data_ptr(), *strides)):
        return q
    return q.clone(memory_format=torch.contiguous_format)


BACKEND = Backend(
    name="FLASHINFER",
    support=Support(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_sizes=(64, 128),
        block_sizes=(16,),
        sliding_window=True,
        soft_cap=True,
        cudagraph=AttentionCGSupport.NEVER,
    ),
    builder=FlashInferMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
)
