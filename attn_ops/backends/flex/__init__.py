"""FLEX: PyTorch's FlexAttention, for any head size and for custom masks.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| cuda, cpu | float32, float16, bfloat16 | any | any | yes | yes | never: not captured |

Keys are gathered from the cache into dense tensors: values in a page after a request's last token
may be NaN, and a weight of zero would not hide them. On CUDA the kernel is fused, and compiled once
a variant of layer. On a CPU FlexAttention runs unfused, in float32, with N * T * C scores.

T rows, C keys of all requests, N query heads, K kv heads, H head size, V head size of values,
P blocks, B block size.
"""

import functools
from typing import TYPE_CHECKING

import torch

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.backends.flex.layout import LayoutMask, layout_mask
from attn_ops.backends.flex.plan import (
    CustomMaskMetadataBuilder,
    FlexMetadataBuilder,
    FlexPlan,
    key_slots_of,
    mask_plan,
    plan_of,
)
from attn_ops.metadata import KV_CACHE_DTYPES, AttentionCGSupport, AttentionMetadata, AttentionSpec

if TYPE_CHECKING:
    from attn_ops.backends.flex.attend import Keys, Mask, Mods, Score

# -- the batch -------------------------------------------------------------------------------------


def forward(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
    plan: FlexPlan | None = None,
    *,
    mods: "Mods | None" = None,
) -> torch.Tensor:
    """Attention over the cache: gathered, then dense."""
    if plan is None:
        plan = mask_plan(meta, meta.common.causal, options.sliding_window)
    if plan is None:
        return _nothing(q, q.shape[2], options)
    slots_C = key_slots_of(meta, plan.num_keys, kv_cache.shape[2])
    layout = layout_mask(meta, plan, options, kv_cache.shape[3])
    return _attend(q, (kv_cache, slots_C), plan, options, mods, options.kv_cache_dtype, layout)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
    mods: "Mods | None" = None,
) -> torch.Tensor:
    """Attention over this step's own keys, without those of padding rows, which may be NaN."""
    plan = mask_plan(meta, meta.common.causal, options.sliding_window)
    if plan is None:
        return _nothing(q, v.shape[2], options)
    num_rows = meta.common.num_actual_tokens
    k_CKH, v_CKV = (_resized(x[:num_rows], plan.num_keys, 0) for x in (k, v))
    return _attend(q, (k_CKH, v_CKV), plan, options, mods, None)


def _attend(
    q: torch.Tensor,
    keys: "Keys",
    plan: FlexPlan,
    options: AttentionOptions,
    mods: "Mods | None",
    kv_cache_dtype: str | None,
    layout: LayoutMask | None = None,
) -> torch.Tensor:
    from attn_ops.backends.flex.attend import Mods, attend

    num_rows = q.shape[0]
    q_TNH = _resized(q, plan.rows_6T.shape[1], None)
    out_TNV, lse_TN = attend(q_TNH, keys, plan, options, mods or Mods(), kv_cache_dtype, layout)
    if options.lse is not None:
        options.lse[: lse_TN.shape[0]] = lse_TN[:num_rows]
        options.lse[lse_TN.shape[0] :].fill_(float("-inf"))
    return out_TNV[:num_rows] if num_rows < len(out_TNV) else _resized(out_TNV, num_rows, 0)


def _nothing(q: torch.Tensor, v_head_size: int, options: AttentionOptions) -> torch.Tensor:
    if options.lse is not None:
        options.lse.fill_(float("-inf"))
    return q.new_zeros(*q.shape[:2], v_head_size)


def _resized(x: torch.Tensor, num_rows: int, fill: int | None) -> torch.Tensor:
    """The first `num_rows` of x [T, N, H], contiguous; behind, `fill`, or whatever is there.

    Without padding by an operator of PyTorch, which takes three kernels.
    """
    if x.shape[0] >= num_rows:
        return x[:num_rows].contiguous()
    out = x.new_empty(num_rows, *x.shape[1:])
    out[: x.shape[0]] = x
    if fill is not None:
        out[x.shape[0] :] = fill
    return out


# -- declarations ----------------------------------------------------------------------------------


def unavailable() -> str | None:
    """It needs nothing but a PyTorch that has FlexAttention."""
    try:
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
    except ImportError as error:
        return f"torch must have FlexAttention with return_aux, got {torch.__version__} ({error})"
    return None


_SUPPORT = Support(
    devices=("cuda", "cpu"),
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
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
)

BACKEND = Backend(
    name="FLEX",
    support=_SUPPORT,
    builder=FlexMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
    varlen=varlen,
    plan_of=plan_of,
)


class CustomMaskSupport(Support):
    """Refuses chunked layers too: their virtual batches are not what the mask means."""

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = super().reasons_against(spec, block_size, device)
        if spec.attention_chunk_size is not None:
            reasons.append(
                "attention_chunk_size must be None with a custom mask, "
                f"got {spec.attention_chunk_size}; supported: None"
            )
        return reasons


def flex_backend(name: str, mask: "Mask", score: "Score | None" = None) -> Backend:
    """A backend like FLEX whose rows see a key only if `mask` says so too.

    It is ANDed with what the layer asks for: the row's own request, causality, window. A mask that
    lets rows see later keys belongs to layers with `causal=False`. `select_backend` takes the
    backend only by name, and never measures it.

    Args:
        name: of the backend, upper case; pass the result to `register_backend`.
        mask: mask(request, query_position, key_position), int32 tensors of any one shape or
            scalars, to a bool tensor; traced on CUDA and run under vmap on a CPU, so no Python
            branches on values. Requests are numbered as in the batch, positions start at 0 with
            each sequence. A tensor that it captures is on the batch's device and is updated in
            place between steps.
        score: score(score, head, request, query_position, key_position), applied to the scores
            after scale, soft cap and ALiBi, before the mask; None: none.

    A row whose mask hides every key is zero, its log-sum-exp -inf (that of its sink, if it has
    one). Tiles of keys are skipped by request, causality and window, not by `mask`. Chunked local
    and cascade attention are refused.

    Example: prefix-LM, the first `prefix[request]` tokens of a sequence see each other::

        prefix = torch.zeros(max_num_seqs, dtype=torch.int32, device="cuda")

        def prefix_lm(request, query_position, key_position):
            return (key_position < prefix[request]) | (key_position <= query_position)

        register_backend(flex_backend("PREFIX_LM", prefix_lm))
        # layers: AttentionSpec(..., causal=False); each step: prefix[:n].copy_(lengths)

    Raises:
        ValueError: `mask` or `score` cannot be called.
    """
    for argument, value in (("mask", mask), ("score", score)):
        if not callable(value) and not (argument == "score" and value is None):
            raise ValueError(f"{argument} must be callable, got {type(value).__name__}")
    from attn_ops.backends.flex.attend import Mods

    mods = Mods(mask, score)
    return Backend(
        name=name,
        support=CustomMaskSupport(**{**vars(_SUPPORT), "own_mask": True}),
        builder=CustomMaskMetadataBuilder,
        forward=functools.partial(forward, mods=mods),
        unavailable=unavailable,
        varlen=functools.partial(varlen, mods=mods),
        plan_of=plan_of,
    )
