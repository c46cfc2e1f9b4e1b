"""A prefix that all requests of a step share: how long it is, and when reading it once pays.

S requests, B tokens a block holds.
"""

from graphs.requests.scheduled import Rows
from graphs.step.blocks import BlockRows

LEAST_REQUESTS = 16
LEAST_TOKENS = 1 << 16
"""Requests times tokens of the prefix. On one H200 (`benchmarks.cascade`, 32 query and 8 KV heads)
attention to prefix and rest apart took 1.06 of plain attention's time at 64 requests x 512 tokens,
0.83 at 64 x 1,024, 0.21 at 64 x 8,192, 0.52 at 256 x 1,024; of 8 requests 1.6 at 2,048 tokens."""


def shared_prefix(step: Rows, blocks: BlockRows, block_size: int) -> int:
    """Tokens at the beginning of all requests, in the same blocks; 0 where it would not pay.

    They are in the cache before the step: none of them is computed in it.
    """
    if len(step) < LEAST_REQUESTS:
        return 0
    most = min([s.num_computed for s in step]) // block_size
    if most * block_size * len(step) < LEAST_TOKENS:
        return 0
    number = blocks.num_shared([request.id for request in step.requests], most)
    length = number * block_size
    return length if length * len(step) >= LEAST_TOKENS else 0
