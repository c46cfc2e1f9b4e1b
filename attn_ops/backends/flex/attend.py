"""FlexAttention over gathered keys: compiled on CUDA, once a variant; eager on a CPU.

Everything between q and the result is one function of tensors, which Dynamo guards by their shapes
alone. With masks made outside, its guards on closures took most of 650 us a call (H200, 2026-11).

T rows, C keys, N query heads, K kv heads, H head size, V head size of values, P blocks, B block
size, I tiles of rows, J tiles of keys.
"""

import contextlib
import functools
import math
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.finite import finite_values
from attn_ops.backends.flex.layout import LayoutMask
from attn_ops.backends.flex.plan import KEY_TILE, FlexPlan
from attn_ops.integers import next_power_of_2
from attn_ops.metadata import kv_dtype_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""mask(request, query_position, key_position) -> bool, element by element."""

Score = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""score(score, head, request, query_position, key_position) -> score, element by element."""

Keys = tuple[torch.Tensor, torch.Tensor]
"""k [C, K, H] and v [C, K, V]; or kv_cache [P, 2, B, K, H] and the keys' slots in it, [C] int64."""

_AUTOCAST = functools.reduce(
    operator.or_,
    map(
        torch._C.DispatchKeySet,
        (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA),
    ),
)
"""Stays excluded: dtypes are chosen here."""

_MIN_HEAD_SIZE = 16  # of FlexAttention on CUDA; smaller heads are padded


class Mods(NamedTuple):
    """What a custom backend adds to the mask and the scores."""

    mask: Mask | None = None
    score: Score | None = None


def attend(
    q: torch.Tensor,
    keys: Keys,
    plan: FlexPlan,
    options: AttentionOptions,
    mods: Mods,
    kv_cache_dtype: str | None,
    layout: LayoutMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, N, H], T that of the plan -> [T, N, V] in q's dtype, log-sum-exp [T, N] float32.

    Rows that see no key are zero and -inf. `kv_cache_dtype` is None where keys are given.
    """
    # FlexAttention refuses tensors that require gradients on a CPU, under no_grad too.
    k, v = keys
    if q.requires_grad or k.requires_grad or v.requires_grad:
        q, k, v = q.detach(), k.detach(), v.detach()
    # Scale and cap are tensors: Dynamo would guard on numbers, and compile for each of them.
    cap = None if options.soft_cap is None else _scalar(options.soft_cap, q.device)
    layer = (
        _scalar(options.scale, q.device), cap, options.alibi_slopes, options.sinks,
        options.k_scale, options.v_scale,
    )  # fmt: skip
    tiles = plan.num_tiles_11I, plan.tiles_11IJ
    blocks = None, None
    if layout is not None:
        tiles, blocks = (layout.num_tiles_1NI, layout.tiles_1NIJ), (layout.seen_NRR, layout.keys_CK)
    tensors = (q, k, v, plan.rows_6T, *tiles, *layer, *blocks)
    variant = _Variant(
        q.shape[1], q.shape[2], (v if kv_cache_dtype is None else k).shape[-1], q.dtype, k.stride(),
        plan.row_tile, kv_cache_dtype, tuple([x is not None for x in layer]), mods,
        None if layout is None else layout.block_size,
    )  # fmt: skip
    grad = torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()
    with grad, _as_outside_operators():
        if plan.fused:
            return compiled(variant)(*tensors)
        return _computation(variant, _eager)(*tensors)


def _as_outside_operators() -> contextlib.AbstractContextManager[None]:
    """Let functorch and Dynamo work inside an operator.

    FlexAttention evaluates masks under vmap. Where a dispatch mode calls our operator (AOTAutograd
    has one around the first run of a graph, to look for outputs that alias inputs; opcheck has
    another), the dispatcher has excluded functorch's keys, and indexing in a mask fails with "could
    not find kernel for custom_function_call". To index by an operator instead would help our masks
    only, not a user's. All keys are readmitted, not functorch's two alone: Dynamo guards on them,
    and would compile once for such a run and once for the others.
    """
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _AUTOCAST)


# Cached: a tensor of a number is a copy to the device; layers have few scales and caps.
@functools.lru_cache(maxsize=256)
def _scalar(number: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.float32, device=device)


# -- variants --------------------------------------------------------------------------------------


class _Variant(NamedTuple):
    """What makes a kernel of its own; lengths, window, scale and cap do not."""

    num_heads: int
    head_size: int
    v_head_size: int
    dtype: torch.dtype
    strides: tuple[int, ...]  # of the cache, or of k, which tell the kv heads too
    row_tile: int
    kv_cache_dtype: str | None  # None: keys are given, not gathered
    has: tuple[bool, ...]  # which tensors the layer has, in the order of the call
    mods: Mods
    sparse_size: int | None = None  # tokens of a block of the layer's layout

    def kernel_options(self) -> "FlexKernelOptions":
        """Tiles whose rows, and two stages of keys and values, fit into 99 KiB of shared memory.

        PyTorch's own choice is tuned for a few head sizes and may not fit for the others.
        """
        widest = max(self.head_size, self.v_head_size)
        row_bytes = next_power_of_2(widest) * self.dtype.itemsize
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
            "BLOCKS_ARE_CONTIGUOUS": self.sparse_size is None,
        }


# -- the computation -------------------------------------------------------------------------------


def _computation(variant: _Variant, flex: Callable[..., Any]) -> Callable[..., Any]:
    """The computation by a form of FlexAttention: (out, log-sum-exp) of `attend`'s tensors."""
    own_mask, own_score = variant.mods.mask, variant.mods.score
    size = variant.sparse_size or 1

    def attention(
        q_TNH, k, v, rows_6T, num_tiles, tiles, scale, cap, slopes_N, sinks_N, k_scale, v_scale,
        seen_NRR, keys_CK,
    ):  # fmt: skip
        first_T, end_T, alive_T, start_T, position_T, request_T = rows_6T.unbind(0)

        def mask_mod(batch, head, row, key):
            seen = (key >= first_T[row]) & (key < end_T[row])
            if seen_NRR is not None:
                most = seen_NRR.shape[1] - 1
                row_block = (position_T[row] // size).clamp(0, most)
                block = ((key - start_T[row]) // size).clamp(0, most)
                seen = seen & seen_NRR[head, row_block, block]
            if own_mask is not None:
                seen = seen & own_mask(request_T[row], position_T[row], key - start_T[row])
            return seen

        def score_mod(value, batch, head, row, key):
            value = value * scale
            if cap is not None:
                value = cap * torch.tanh(value / cap)
            if slopes_N is not None:
                value = value - slopes_N[head] * (position_T[row] + start_T[row] - key).abs()
            if own_score is not None:
                value = own_score(value, head, request_T[row], position_T[row], key - start_T[row])
            return value

        dtype = torch.float32 if q_TNH.device.type == "cpu" else q_TNH.dtype
        if variant.kv_cache_dtype is not None:
            k, v = _gathered(k, v, variant.kv_cache_dtype, k_scale, v_scale, keys_CK, dtype)
        k, v = finite_values(k, v)  # tiles mix requests
        q, k, v = (_dense(x, dtype, flex is not _eager) for x in (q_TNH, k, v))
        block_mask = BlockMask.from_kv_blocks(
            num_tiles,
            tiles,
            BLOCK_SIZE=(variant.row_tile, KEY_TILE),
            mask_mod=mask_mod,
            seq_lengths=(q.shape[2], k.shape[2]),
            compute_q_blocks=False,  # for a backward pass
        )
        out_1NTV, lse_1NT = flex(q, k, v, score_mod, block_mask)
        out_TNV = out_1NTV[0, :, :, : variant.v_head_size].transpose(0, 1)
        return _finished(out_TNV, lse_1NT[0].transpose(0, 1), sinks_N, alive_T != 0, q_TNH.dtype)

    return attention


def _gathered(
    kv_cache: torch.Tensor,
    slots_C: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    keys_CK: torch.Tensor | None,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Keys and values, each [C, K, H]; zeros where the slot is PAD_SLOT_ID or no row sees them."""
    fp8, found = kv_dtype_of(kv_cache_dtype), []
    owned_CK1 = (slots_C >= 0)[:, None, None]
    if keys_CK is not None:
        owned_CK1 = owned_CK1 & keys_CK[:, :, None]
    slots_C = slots_C.clamp(min=0)
    block_C, offset_C = slots_C // kv_cache.shape[2], slots_C % kv_cache.shape[2]
    for half, scale in enumerate((k_scale, v_scale)):
        x_CKH = kv_cache[:, half][block_C, offset_C]
        if fp8 is not None:
            x_CKH = x_CKH.view(fp8).float()
            x_CKH = x_CKH if scale is None else x_CKH * scale
        found.append(torch.where(owned_CK1, x_CKH, 0).to(dtype))
    return found


def _dense(x_TNH: torch.Tensor, dtype: torch.dtype, widened: bool) -> torch.Tensor:
    """[1, N, T, H], heads at least as wide as the kernel wants them."""
    missing = _MIN_HEAD_SIZE - x_TNH.shape[2]
    if widened and missing > 0:
        x_TNH = torch.nn.functional.pad(x_TNH, (0, missing))
    return x_TNH.to(dtype).contiguous().transpose(0, 1).unsqueeze(0)


def _finished(
    out_TNV: torch.Tensor,
    lse_TN: torch.Tensor,
    sinks_N: torch.Tensor | None,
    alive_T: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sinks join the softmax; rows of padding, and of requests without keys, are zero and -inf."""
    if sinks_N is not None:
        sinks_N = sinks_N.float()
        share_TN = torch.sigmoid(lse_TN - sinks_N)
        # A sink of -inf makes that a NaN in rows that see no key.
        share_TN = share_TN.masked_fill(torch.isneginf(lse_TN), 0)
        out_TNV = out_TNV * share_TN.unsqueeze(-1)
        lse_TN = torch.logaddexp(lse_TN, sinks_N)
    out_TNV = torch.where(alive_T[:, None, None], out_TNV, 0).to(dtype).contiguous()
    return out_TNV, torch.where(alive_T[:, None], lse_TN, -math.inf)


# -- on a CPU --------------------------------------------------------------------------------------


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: BlockMask,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator behind `flex_attention`, which would have Dynamo trace every new batch."""
    out, lse, *_ = torch.ops.higher_order.flex_attention(
        q, k, v, score_mod, block_mask.as_tuple(), 1.0, {}
    )
    return out, lse * math.log(2)  # its log-sum-exp is to base 2


# -- on CUDA ---------------------------------------------------------------------------------------


class _Fused:
    """The computation of one variant, compiled when it is first called, for any lengths.

    Dynamo counts recompilations by code object and gives up after 8 of one; so each variant has a
    code object of its own. Which sizes change is said once: its guards take later calls without.
    After `torch._dynamo.reset()` Dynamo finds out by itself, and compiles once more when they do.
    """

    def __init__(self, variant: _Variant, backend: str) -> None:
        kernel_options = variant.kernel_options()

        def fused(q, k, v, score_mod, block_mask):
            out, aux = flex_attention(
                q, k, v, score_mod, block_mask, 1.0, True,
                kernel_options=kernel_options, return_aux=AuxRequest(lse=True),
            )  # fmt: skip
            return out, aux.lse

        attention: Any = _computation(variant, fused)
        own = types.FunctionType(
            attention.__code__.replace(), attention.__globals__, closure=attention.__closure__
        )
        self._run: Any = torch.compile(own, backend=backend, fullgraph=True)
        self._compiled = False

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self._compiled:
            return self._run(*tensors)
        q, k, v, rows_6T, num_tiles_11I, tiles_11IJ, *_ = cast(list[torch.Tensor], tensors)
        seen_NRR, keys_CK = tensors[-2:]
        if seen_NRR is not None and keys_CK is not None:
            torch._dynamo.maybe_mark_dynamic(seen_NRR, (1, 2))
            torch._dynamo.maybe_mark_dynamic(keys_CK, 0)
        for tensor, sizes in (
            (q, 0), (k, 0), (v, 0), (rows_6T, 1), (num_tiles_11I, 2), (tiles_11IJ, (2, 3)),
        ):  # fmt: skip
            torch._dynamo.maybe_mark_dynamic(tensor, sizes)
        # Duck shapes would take 2 tiles and 2 heads for one size, and compile again for 3.
        with symbolic_shapes_config.patch(use_duck_shape=False):
            out = self._run(*tensors)
        self._compiled = True
        return out


# Cached: holds the compiled kernels of each variant, which take seconds to compile.
@functools.cache
def compiled(variant: _Variant, backend: str = "inductor") -> _Fused:
    """The fused kernels of a variant."""
    return _Fused(variant, backend)
