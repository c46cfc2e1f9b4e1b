"""VARLEN: PyTorch's own `torch.nn.attention.varlen.varlen_attn`, with and without a paged cache.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| cuda, sm_90 | fp16, bf16 | 64, 96, 128, 192, 256 | 16, 32, 64 | yes | no | never |

Also non-causal batches, and attention without a cache (`varlen`).

The function has block tables from torch 2.12 on, and kernels that read them only as FlashAttention
3: PyTorch's built-in FA2 refuses a block table, its FA4 reads one on sm_100 alone. So FA3 must have
been activated, which changes all of PyTorch's attention and is the user's to decide:
`torch.nn.attention.activate_flash_attention_impl("FA3")` with upstream's `flash_attn_interface`.

Written against the source of torch 2.13 and not run on a GPU yet: hence no CUDA graph and no
log-sum-exp, and head and block sizes are those that FLASH_ATTN has measured for FA3.

T tokens, S requests, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.compat.torch_version import TORCH_VERSION
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

OLDEST_TORCH = (2, 12)
"""The first with block tables in `varlen_attn`."""


def unavailable() -> str | None:
    """Not cached: FA3 may be activated at any time."""
    if TORCH_VERSION < OLDEST_TORCH:
        return f"torch must be 2.12 or later, got {torch.__version__}"
    if not torch.cuda.is_available():
        return "a CUDA device must be present, got none"
    if torch.cuda.get_device_capability()[0] != 9:
        return f"the GPU must be sm_90, got {torch.cuda.get_device_name()}"
    active = active_implementation()
    if active != "FA3":
        return (
            "torch's FlashAttention must be FA3 for paged caches, got "
            f"{active or 'the built-in FA2'}; see torch.nn.attention.activate_flash_attention_impl"
        )
    return None


def active_implementation() -> str | None:
    """What `activate_flash_attention_impl` was last called with; None: the built-in kernels."""
    return importlib.import_module("torch.nn.attention").current_flash_attention_impl()


# Cached: found once, not once a layer.
@functools.cache
def varlen_function() -> Callable[..., Any]:
    return importlib.import_module("torch.nn.attention.varlen").varlen_attn


class VarlenMetadataBuilder(AttentionMetadataBuilder):
    """Nothing to plan: the kernels read lengths and tables on the device."""

    cudagraph_support = AttentionCGSupport.NEVER


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H]."""
    common = meta.common
    k_PBKH, v_PBKH = kv_cache.unbind(1)
    paged = {
        "cu_seq_k": None,  # FA3 takes it or a block table
        "max_k": common.max_seq_len,
        "seqused_k": common.seq_lens,
        "block_table": common.block_table_tensor,
    }
    return _attend(q, k_PBKH, v_PBKH, common, options, paged)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """q [T, N, H], k and v [T, K, H] -> [T, N, H]; each request over its own rows."""
    common = meta.common
    rows = common.num_actual_tokens
    own = {"cu_seq_k": common.query_start_loc, "max_k": common.max_query_len}
    # The kernels load whole tiles of keys; a NaN of the padding rows behind would come out.
    return _attend(q, k[:rows], v[:rows], common, options, own)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    keys: dict[str, Any],
) -> torch.Tensor:
    """k and v [P, B, K, H] with a block table in `keys`, or [rows, K, H]."""
    rows = common.num_actual_tokens
    if rows == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    with torch.no_grad():  # block tables have no backward
        result = varlen_function()(
            q[:rows],
            k,
            v,
            cu_seq_q=common.query_start_loc,
            max_q=common.max_query_len,
            scale=options.scale,
            window_size=window_sizes(options.sliding_window, common.causal),
            enable_gqa=q.shape[1] != k.shape[-2],
            **keys,
        )
    if rows == q.shape[0]:
        return result.contiguous()
    out_TNH = torch.empty_like(q, memory_format=torch.contiguous_format)
    out_TNH[:rows] = result
    out_TNH[rows:].zero_()
    return out_TNH


def window_sizes(window: int | None, causal: bool) -> tuple[int, int]:
    """Keys to the left and right of the query's own, -1 for all; (-1, 0) is how causal is said."""
    left = -1 if window is None else window - 1
    return left, 0 if causal else left


BACKEND = Backend(
    name="VARLEN",
    support=Support(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_sizes=(64, 96, 128, 192, 256),
        block_sizes=(16, 32, 64),
        sliding_window=True,
        soft_cap=False,
        cudagraph=AttentionCGSupport.NEVER,
        non_causal=True,
    ),
    builder=VarlenMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
    varlen=varlen,
)
