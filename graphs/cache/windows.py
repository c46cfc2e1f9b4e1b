"""Blocks of layers with a window, where other layers of the model see all keys.

Blocks behind the window are given back. So requests own few of them, whatever their lengths, and
such layers have blocks of their own, as many as a full batch needs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from attn_ops import AttentionSpec
from attn_ops.kv_cache import bytes_per_block, has_window, window_of
from graphs.options import SessionOptions
from graphs.requests.blocks import STRIDE

SHARED_TIMES = 8
"""Where requests share prefixes, blocks stay after them: room for so many times the batch."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """Sizes of a cache whose layers may be of both kinds.

    Attributes:
        num_blocks: those that layers with a window need, the null block among them; None: all
            layers have the same blocks.
        bytes_whole, bytes_window: of a block in the caches of layers that see all keys, and of the
            others.
        least_blocks: of `num_blocks`, those of a batch that keeps no prefixes.
    """

    num_blocks: int | None
    bytes_whole: int
    bytes_window: int
    least_blocks: int = 0

    @classmethod
    def of(
        cls, specs: Sequence[AttentionSpec], options: SessionOptions, model: Any, builder: Any
    ) -> "Windows":
        """What layers need.

        All have the same blocks where whole lengths are reserved, and where the backend's builder
        does not take two kinds.

        Args:
            specs: of the layers.
            options: of the session.
            model: uncompiled; layers of Transformers models take slots of both kinds.
            builder: of the attention metadata.
        """
        windowed = [spec for spec in specs if has_window(spec)]
        whole = [spec for spec in specs if not has_window(spec)]
        sizes = [bytes_per_block(some, options.block_size) for some in (whole, windowed)]
        config = model.config.get_text_config()
        may = getattr(config, "_attn_implementation", None) == "attn_ops"
        may = may and options.lookahead is not None
        if not (may and whole and windowed and builder.takes_windows):
            return cls(None, *sizes)
        times = SHARED_TIMES if options.share_prefixes else 1
        least = _blocks_of_a_batch(windowed, options)
        return cls(times * least, *sizes, least_blocks=least)

    def num_bytes(self, num_blocks: int) -> int:
        """Of so many blocks of layers that see all keys, the null block among them."""
        own = num_blocks if self.num_blocks is None else min(num_blocks, self.num_blocks)
        return num_blocks * self.bytes_whole + own * self.bytes_window

    def within(self, num_bytes: int, wanted: int) -> "Windows":
        """The same; with fewer blocks for prefixes, where so many bytes hold too few others.

        Args:
            num_bytes: that the cache may take.
            wanted: blocks of layers that see all keys, the null block among them.
        """
        if self.num_blocks is None or self.fitting(num_bytes) >= wanted:
            return self
        left = (num_bytes - wanted * self.bytes_whole) // self.bytes_window
        number = min(self.num_blocks, max(self.least_blocks, left))
        return self if number == self.num_blocks else dataclasses.replace(self, num_blocks=number)

    def fitting(self, num_bytes: int) -> int:
        """The most blocks of layers that see all keys, in so many bytes."""
        same = num_bytes // (self.bytes_whole + self.bytes_window)
        if self.num_blocks is None or same <= self.num_blocks:
            return same
        return (num_bytes - self.num_blocks * self.bytes_window) // self.bytes_whole


def _blocks_of_a_batch(windowed: Sequence[AttentionSpec], options: SessionOptions) -> int:
    """Enough for a full batch that decodes, and for two steps of prompts beside it."""
    size, lookahead = options.block_size, options.lookahead or 0
    window = max(window_of(spec) or 0 for spec in windowed)
    tokens = max(window, size + 1) + size + max(STRIDE, lookahead) + lookahead
    prompts = 2 * options.max_tokens_per_step
    return 1 + options.max_batch_size * (-(-tokens // size) + 2) + -(-prompts // size)
