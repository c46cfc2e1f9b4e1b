"""What a layer can ask for, and how a backend declares that it can do it.

Batches are query lengths and seq_lens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from attn_ops.block_layout import BlocksparseParams, BlockTables, local_strided
from attn_ops.metadata import KV_CACHE_DTYPES, Support

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
}
"""Relative error norm against the float64 oracle, by the dtype of q."""

LENGTHS = {
    "decode": ([1, 1, 1, 1], [1, 2, 17, 70]),
    "mixed": ([1, 1, 0, 7, 40], [5, 33, 0, 7, 61]),
    "prefill": ([1, 18, 35], [1, 18, 35]),
    "uniform": ([4, 4, 4], [4, 50, 35]),
}
"""Query lengths and seq_lens: ragged, with 0 and 1."""

UNIFORM = {n: ([n] * 4, [n, n + 1, 33, 70]) for n in range(2, 9)}
"""Drafts to verify: 1 + k query tokens each."""

CROSS = {
    "decoding": ([1, 1, 1], [1, 40, 17]),
    "prompts": ([5, 20, 1], [3, 1, 50]),
}
"""Queries over an encoder's keys: rows have no positions among them, and may be more."""

Options = Callable[[int, torch.device], dict[str, Any]]


def _slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.02, 0.5, num_heads, device=device)


def _sinks(num_heads: int, device: torch.device) -> torch.Tensor:
    """bfloat16 numbers, as models store them and FlashAttention reads them."""
    return torch.linspace(-2, 3, num_heads, device=device).bfloat16().float()


def _blocks(num_heads: int, device: torch.device) -> BlockTables:
    """Two local blocks of 16 tokens and every third, for two query heads a KV head."""
    params = BlocksparseParams(128, num_heads, num_heads // 2, 16, 2, 3)
    return BlockTables(local_strided(params)).to(device)


def _scales(dtype: str, device: torch.device) -> dict[str, Any]:
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([1.7])}
    return {"kv_cache_dtype": dtype, **{name: s.to(device) for name, s in scales.items()}}


@dataclasses.dataclass(frozen=True)
class Feature:
    """One thing that a layer asks for."""

    declared: Callable[[Support], bool]
    options: Options  # of `attention`, for a number of heads on a device
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)  # what of it is geometry
    refusal: str = ""  # the argument that the error names where it is not declared


FEATURES = {
    "plain": Feature(lambda s: True, lambda n, d: {}),
    "window": Feature(
        lambda s: s.sliding_window,
        lambda n, d: {"sliding_window": 9},
        {"sliding_window": 9},
        "sliding_window",
    ),
    "soft_cap": Feature(
        lambda s: s.soft_cap, lambda n, d: {"soft_cap": 5.0}, {"soft_cap": 5.0}, "soft_cap"
    ),
    "alibi": Feature(
        lambda s: s.alibi, lambda n, d: {"alibi_slopes": _slopes(n, d)}, {"alibi": True}, "alibi"
    ),
    "sinks": Feature(
        lambda s: s.sinks, lambda n, d: {"sinks": _sinks(n, d)}, {"sinks": True}, "sinks"
    ),
    "sinks, window": Feature(
        lambda s: s.sinks and s.sliding_window,
        lambda n, d: {"sinks": _sinks(n, d), "sliding_window": 9},
        {"sinks": True, "sliding_window": 9},
        "sinks|sliding_window",
    ),
    "blocksparse": Feature(
        lambda s: s.blocksparse,
        lambda n, d: {"blocksparse": _blocks(n, d)},
        {"blocksparse": 16},
        "sparse_block_size",
    ),
    "non-causal": Feature(lambda s: s.non_causal, lambda n, d: {}, {"causal": False}, "causal"),
    "non-causal, window": Feature(
        lambda s: s.non_causal and s.sliding_window and s.non_causal_window,
        lambda n, d: {"sliding_window": 9},
        {"causal": False, "sliding_window": 9},
        "causal|sliding_window",
    ),
    **{
        dtype: Feature(
            lambda s, dtype=dtype: dtype in s.kv_cache_dtypes,
            lambda n, d, dtype=dtype: _scales(dtype, d),
            {"kv_cache_dtype": dtype},
            "kv_cache_dtype",
        )
        for dtype in KV_CACHE_DTYPES
        if dtype != "auto"
    },
}

HEADS = {"mha": (2, 2), "gqa": (8, 2), "mqa": (4, 1)}
"""Query heads and KV heads."""
