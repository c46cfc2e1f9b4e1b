"""Prefixes that requests of a step share: which, how long, and when reading them once pays.

S requests, G groups of neighbours, B tokens a block holds.
"""

import dataclasses

import numpy as np

from graphs.requests.batch import Rows
from graphs.step.blocks import BlockRows

LEAST_REQUESTS = 16
LEAST_BYTES = 60_000 * 4096
"""Of a layer's keys and values that need not be read again, all requests together. On one H200
(4,096 bytes a token) attention to prefix and rest apart took 1.06 of plain
attention's time at 64 requests x 512 tokens, 0.83 at 64 x 1,024, 0.21 at 64 x 8,192, 0.52 at 256 x
1,024; of 8 requests 1.6 at 2,048 tokens."""

MOST_LEVELS = 8
"""Lengths of a prefix that are tried: of a system prompt, of the prompts behind it."""


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """Neighbours that begin alike."""

    starts: np.ndarray  # [G + 1]: the first request of each group, and S
    lens: np.ndarray  # [S]: tokens that a request shares with its group, in whole blocks

    @property
    def num_groups(self) -> int:
        """G."""
        return self.starts.size - 1


def shared_prefixes(
    step: Rows, blocks: BlockRows, block_size: int, token_bytes: int
) -> SharedPrefixes | None:
    """Of decodes; None where they share too little for it to pay.

    Shared tokens are in the cache before the step, which computes the last of each request.

    Args:
        step: the requests.
        blocks: of all requests.
        block_size: B.
        token_bytes: of a token's keys and values in a layer.
    """
    least = LEAST_BYTES / (block_size * token_bytes)  # blocks
    if len(step) < LEAST_REQUESTS:
        return None
    computed_S = step.columns.num_computed // block_size
    if computed_S.sum() < least:
        return None
    most = np.minimum(computed_S[:-1], computed_S[1:])
    common = blocks.num_common([request.id for request in step.requests], most)
    levels = np.unique(common[common > 0])[::-1]
    if levels.size > MOST_LEVELS:
        levels = levels[np.linspace(0, levels.size - 1, MOST_LEVELS).astype(int)]
    found = [_groups(common, level) for level in levels]
    saved, starts, lens = max(found, key=lambda one: one[0], default=(0, None, None))
    if starts is None or lens is None or saved < least:
        return None
    return SharedPrefixes(starts, lens * block_size)


def _groups(common: np.ndarray, level: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Groups of neighbours with at least `level` blocks in common.

    Args:
        common: [S - 1] blocks that each request has in common with the one before it.
        level: at least 1.

    Returns:
        Blocks that are read once less, `starts` and `lens` in blocks; requests that share nothing
        are together in groups of length 0.
    """
    size = common.size + 1
    cuts = np.flatnonzero(common < level) + 1
    starts = np.concatenate([[0], cuts])
    number = np.diff(np.append(starts, size))
    # Of each group the least in common of its neighbours; that of its first one does not count.
    within = np.append(np.iinfo(np.int64).max, common)
    within[starts] = np.iinfo(np.int64).max
    length = np.where(number > 1, np.minimum.reduceat(within, starts), 0)
    saved = int(((number - 1) * length).sum())
    kept = np.append(True, (length[1:] > 0) | (length[:-1] > 0))
    return saved, np.append(starts[kept], size), np.repeat(length, number)
