"""The cache of a session: sized, then allocated."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from attn_ops import AttentionSpec, PagedKVCache
from graphs.cache.device import StepMemory, measured
from graphs.cache.size import CacheSize, Sizing
from graphs.cache.windows import Windows
from graphs.capture.plan import CapturePlan
from graphs.options import SessionOptions
from graphs.runner import StepRunner

WORKSPACE_BYTES = 32 * 2**20
"""That cuBLAS keeps for the stream of captures (H200, torch 2.11)."""


class Owner(Protocol):
    """What is read of a `DecodeSession`."""

    original: Any
    device: torch.device
    specs: list[AttentionSpec]
    plan: CapturePlan
    builder: Any


def made_cache(
    owner: Owner, options: SessionOptions, runner_of: Callable[..., StepRunner]
) -> tuple[CacheSize, PagedKVCache]:
    """The cache and why it is as large as it is.

    Args:
        owner: the session.
        options: its options.
        runner_of: makes a `StepRunner` of `model` and `cache`.

    Raises:
        ValueError: it does not fit into the memory of the device.
    """
    more = {
        "block_size": options.block_size,
        "device": owner.device,
        "cache_layout": options.cache_layout,
    }

    def measure() -> StepMemory:
        cache = PagedKVCache(owner.specs, num_tokens=options.block_size, **more)
        runner = runner_of(model=owner.original, cache=cache)
        return measured(runner, options.max_tokens, options.max_tokens_per_step)

    graphs = 0
    if owner.plan.first_keys() and options.debug is None:
        estimated = owner.plan.estimated_bytes
        graphs = None if estimated is None else estimated + WORKSPACE_BYTES
    windows = Windows.of(owner.specs, options, owner.original, owner.builder)
    sizing = Sizing(options, owner.specs, _bytes_of(owner.original), graphs, windows)
    size = sizing.decide(owner.device, measure)
    more["window_blocks"] = size.window_blocks
    return size, PagedKVCache(owner.specs, num_tokens=size.num_tokens, **more)


def _bytes_of(model: torch.nn.Module) -> int:
    """Of its parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
