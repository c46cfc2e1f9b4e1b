"""FlexAttention over dense keys: fused on CUDA, compiled once a variant; eager on a CPU.

T rows, C keys, N query heads, K kv heads, H head size, V head size of values.
"""

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.flex.plan import KEY_TILE, FlexPlan

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""mask(request, query_position, key_position) -> bool, element by element."""

Score = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""score(score, head, request, query_position, key_position) -> score, element by element."""


@dataclasses.dataclass(frozen=True)
class Mods:
    """What a custom backend adds to the mask and the scores."""

    mask: Mask | None = None
    score: Score | None = None


def attend(
    q_TNH: torch.Tensor,
    k_CKH: torch.Tensor,
    v_CKV: torch.Tensor,
    plan: FlexPlan,
    options: AttentionOptions,
    mods: Mods,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, N, V] and log-sum-exp [T, N] float32, sinks not yet among them."""
    # FlexAttention refuses tensors that require gradients on a CPU, under no_grad too.
    tensors = [x.detach().transpose(0, 1).unsqueeze(0) for x in (q_TNH, k_CKH, v_CKV)]
    score_mod = _score_mod(plan, options, mods, q_TNH.device)
    block_mask = BlockMask.from_kv_blocks(
        plan.num_tiles_11I,
        plan.tiles_11IJ,
        BLOCK_SIZE=(plan.row_tile, KEY_TILE),
        mask_mod=_mask_mod(plan, mods.mask),
        seq_lengths=(q_TNH.shape[0], k_CKH.shape[0]),
        compute_q_blocks=False,  # for a backward pass
    )
    with torch.no_grad(), _as_outside_operators():
        if plan.fused:
            variant = _Variant.of(tensors, plan, options, mods)
            # Duck shapes would take 2 tiles and 2 heads for one size, and compile again for 3.
            with symbolic_shapes_config.patch(use_duck_shape=False):
                out_1NTV, lse_1NT = compiled(variant)(*tensors, score_mod, block_mask)
        else:
            out_1NTV, lse_1NT = _eager(tensors, score_mod, block_mask)
    return out_1NTV[0].transpose(0, 1), lse_1NT[0].transpose(0, 1)


def _as_outside_operators() -> contextlib.AbstractContextManager[None]:
    """Let functorch and Dynamo work inside an operator.

    FlexAttention evaluates masks under vmap. Where a dispatch mode calls our operator (AOTAutograd
    has one around the first run of a graph, to look for outputs that alias inputs; opcheck has
    another), the dispatcher has excluded functorch's keys, and indexing in a mask fails with "could
    not find kernel for custom_function_call". To index by an operator instead would help our masks
    only, not a user's. All keys are readmitted, not functorch's two alone: Dynamo guards on them,
    and would compile once for such a run and once for the others.
    """
    key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
    autocast = keys(key.AutocastCPU) | keys(key.AutocastCUDA)  # dtypes are chosen here
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), autocast)


# -- mask and score --------------------------------------------------------------------------------


def _mask_mod(plan: FlexPlan, mask: Mask | None) -> Callable[..., torch.Tensor]:
    first_T, end_T = plan.first_key_T, plan.end_key_T
    request_T, position_T, start_T = plan.request_T, plan.position_T, plan.start_T

    def document(batch, head, row, key):
        return (key >= first_T[row]) & (key < end_T[row])

    if mask is None:
        return document

    def document_and_mask(batch, head, row, key):
        seen = (key >= first_T[row]) & (key < end_T[row])
        return seen & mask(request_T[row], position_T[row], key - start_T[row])

    return document_and_mask


def _score_mod(
    plan: FlexPlan, options: AttentionOptions, mods: Mods, device: torch.device
) -> Callable[..., torch.Tensor]:
    """Scale and cap are tensors: Dynamo would guard on numbers, and compile for each of them."""
    scale = _scalar(options.scale, device)
    cap = None if options.soft_cap is None else _scalar(options.soft_cap, device)
    slopes_N, score = options.alibi_slopes, mods.score
    request_T, position_T, start_T = plan.request_T, plan.position_T, plan.start_T

    def score_mod(value, batch, head, row, key):
        value = value * scale
        if cap is not None:
            value = cap * torch.tanh(value / cap)
        if slopes_N is not None:
            value = value - slopes_N[head] * (position_T[row] + start_T[row] - key).abs()
        if score is not None:
            value = score(value, head, request_T[row], position_T[row], key - start_T[row])
        return value

    return score_mod


@functools.lru_cache(maxsize=256)
def _scalar(number: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.float32, device=device)


# -- on a CPU --------------------------------------------------------------------------------------


def _eager(
    tensors: list[torch.Tensor], score_mod: Callable[..., torch.Tensor], block_mask: BlockMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator behind `flex_attention`, which would have Dynamo trace every new batch."""
    out, lse, *_ = torch.ops.higher_order.flex_attention(
        *tensors, score_mod, block_mask.as_tuple(), 1.0, {}
    )
    return out, lse * math.log(2)  # its log-sum-exp is to base 2


# -- on CUDA ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Variant:
    """What makes a kernel of its own; lengths, window, scale and cap do not."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: torch.dtype
    row_tile: int
    soft_cap: bool
    alibi: bool
    mods: Mods

    @classmethod
    def of(
        cls, tensors: list[torch.Tensor], plan: FlexPlan, options: AttentionOptions, mods: Mods
    ) -> "_Variant":
        q, k, v = tensors
        capped, sloped = options.soft_cap is not None, options.alibi_slopes is not None
        return cls(
            q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, plan.row_tile, capped, sloped,
            mods,
        )  # fmt: skip

    def kernel_options(self) -> "FlexKernelOptions":
        """Tiles whose rows, and two stages of keys and values, fit into 99 KiB of shared memory.

        PyTorch's own choice is tuned for a few head sizes and may not fit for the others.
        """
        widest = max(self.head_size, self.v_head_size)
        row_bytes = (1 << (widest - 1).bit_length()) * self.dtype.itemsize
        narrow = self.dtype.itemsize == 2
        if row_bytes <= 512:
            stages = 2
            block_m, block_n, warps = (64, 32, 4) if narrow else (32, 32, 4)
            if narrow and row_bytes <= 256:
                block_m, block_n, warps = 128, 64, 8
        else:
            stages, warps, block_n = 1, 4, 16
            block_m = 32 if row_bytes <= 1024 else 16
        return {
            "BLOCK_M": min(self.row_tile, block_m),
            "BLOCK_N": block_n,
            "num_warps": warps,
            "num_stages": stages,
            "BLOCKS_ARE_CONTIGUOUS": True,
        }


@functools.cache
def compiled(variant: _Variant, backend: str = "inductor") -> Callable[..., Any]:
    """The fused kernel of one variant, compiled when it is first called, for any lengths.

    Dynamo counts recompilations by code object and gives up after 8 of one; so each variant gets a
    code object of its own.
    """
    kernel_options = variant.kernel_options()

    def fused(q, k, v, score_mod, block_mask):
        out, aux = flex_attention(
            q, k, v, score_mod, block_mask, 1.0, True,
            kernel_options=kernel_options, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse

    own = types.FunctionType(fused.__code__.replace(), fused.__globals__, closure=fused.__closure__)
    return torch.compile(own, backend=backend, dynamic=True, fullgraph=True)
