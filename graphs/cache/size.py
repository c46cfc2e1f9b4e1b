"""How many tokens the cache of a session holds, and why.

Asked for: `cache_tokens`. Otherwise every request of the batch at its longest; on a GPU no more
than is left of it. What is left is only measured where it may be too little.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from attn_ops import AttentionSpec
from graphs.cache.device import StepMemory, memory_of
from graphs.cache.windows import SHARED_TIMES, Windows
from graphs.capture.memory import human
from graphs.options import SessionOptions


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """What a session's cache was sized to.

    Attributes:
        num_tokens: that it holds.
        num_bytes: that they take, the null block included.
        why: who decided it.
        parts: bytes of the GPU where they were measured: total, in_use, weights (among those in
            use), step, graphs and left. Else empty.
        window_blocks: of layers with a window, where they have their own; see `PagedKVCache`.
    """

    num_tokens: int
    num_bytes: int
    why: str
    parts: dict[str, int] = dataclasses.field(default_factory=dict)
    window_blocks: int | None = None

    def __str__(self) -> str:
        return f"{self.num_tokens:,} tokens, {human(self.num_bytes)}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Sizing:
    """Decides the size; the device is only asked where the caller has asked for no size.

    Args:
        options: of the session.
        specs: of its layers.
        weights: bytes of the model.
        graphs: bytes that graphs may take; None: not known, as much as a step.
        windows: blocks of layers with a window.
    """

    options: SessionOptions
    specs: Sequence[AttentionSpec]
    weights: int
    graphs: int | None
    windows: Windows

    def decide(self, device: torch.device, measure: Callable[[], StepMemory]) -> CacheSize:
        """The size on a device; `measure` runs the largest step.

        Raises:
            ValueError: what is left of the GPU does not hold a request of `max_tokens`.
        """
        wanted = self.options.num_cache_tokens
        if self.options.cache_tokens is not None:
            return self._size(wanted, "as asked for by cache_tokens")
        memory = memory_of(device)
        why = "every request of the batch at its longest"
        if self.options.share_prefixes:
            wanted, why = SHARED_TIMES * wanted, f"{SHARED_TIMES} times {why}, to keep prefixes"
        if memory is None:
            return self._size(wanted, why)
        budget = int(memory.total * self.options.memory_fraction) - memory.in_use
        if self._bytes(wanted) <= budget // 2:
            return self._size(wanted, f"{why}; that is less than half of what is left")
        return self._left(measure(), wanted, why)

    def _left(self, step: StepMemory, wanted: int, why: str) -> CacheSize:
        """What is left beside a step and graphs, and no more than is wanted."""
        total, fraction = step.after.total, self.options.memory_fraction
        graphs = step.peak if self.graphs is None else self.graphs
        left = int(total * fraction) - step.after.in_use - step.peak - graphs
        block_size = self.options.block_size
        windows = self.windows.within(left, self._blocks(self.options.num_cache_tokens))
        if windows is not self.windows:
            return dataclasses.replace(self, windows=windows)._left(step, wanted, why)
        num_tokens = max(0, self.windows.fitting(left) - 1) * block_size
        sizes = (
            f"{fraction} of {human(total)} less {human(step.after.in_use)} in use (weights "
            f"{human(self.weights)}), {human(step.peak)} for a step of "
            f"{self.options.max_tokens_per_step:,} tokens and {human(graphs)} for graphs"
        )
        if num_tokens < self.options.max_tokens:
            raise ValueError(
                f"max_tokens must fit into the cache, got {self.options.max_tokens:,}, which take "
                f"{human(self._bytes(self.options.max_tokens))}; left for it are "
                f"{human(max(0, left))}: {sizes}; a smaller max_tokens_per_step, fewer "
                "capture_sizes or a larger memory_fraction leave more"
            )
        parts = {"total": total, "in_use": step.after.in_use, "weights": self.weights}
        parts |= {"step": step.peak, "graphs": graphs, "left": left}
        if num_tokens >= wanted:
            return self._size(wanted, f"{why}; {human(left)} are left, {sizes}", parts)
        return self._size(num_tokens, f"what is left of the GPU, {sizes}", parts)

    def _size(self, num_tokens: int, why: str, parts: dict[str, int] | None = None) -> CacheSize:
        size = self.options.block_size
        num_blocks = -(-num_tokens // size)
        own = self.windows.num_blocks
        if own is not None and own < num_blocks + 1:
            why += f"; layers with a window have {own:,} blocks of their own"
        else:
            own = None
        return CacheSize(num_blocks * size, self._bytes(num_tokens), why, parts or {}, own)

    def _bytes(self, num_tokens: int) -> int:
        """Of so many tokens."""
        return self.windows.num_bytes(self._blocks(num_tokens))

    def _blocks(self, num_tokens: int) -> int:
        """That hold so many tokens, and the null block."""
        return -(-num_tokens // self.options.block_size) + 1
