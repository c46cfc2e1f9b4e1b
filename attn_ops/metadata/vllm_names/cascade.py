"""When vLLM takes a shared prefix apart: the rule of its FlashAttention backend.

Left out: with decode context parallelism vLLM never does; the arguments do not say it.
"""

import numpy as np

MIN_PREFIX = 256
"""Shared tokens from which on vLLM considers it."""

MIN_REQUESTS = 8
"""Requests from which on vLLM considers it."""

TILE = 128
"""Rows of a query tile and keys of a key tile, in vLLM's estimate."""


def cascade_pays(
    common_prefix_len: int,
    query_lens: np.ndarray,
    num_query_heads: int,
    num_kv_heads: int,
    num_sms: int,
) -> bool:
    """Whether vLLM expects attention over prefix and rest to be faster than over the whole.

    A batch of single-token queries with grouped heads would else run a kernel that splits the keys
    among programs; the two are compared by `_cascade_time` and `_split_keys_time`. All other
    batches cascade. The estimate is vLLM's and not measured here.

    Args:
        common_prefix_len: tokens that all requests share.
        query_lens: [S] query tokens of each request.
        num_query_heads, num_kv_heads: of this rank.
        num_sms: multiprocessors of the GPU.
    """
    num_reqs = len(query_lens)
    if common_prefix_len < MIN_PREFIX or num_reqs < MIN_REQUESTS:
        return False
    heads_per_kv = num_query_heads // num_kv_heads
    if heads_per_kv == 1 or (query_lens != 1).any():
        return True
    key_tiles = _ceil_div(common_prefix_len, TILE)
    cascade = _cascade_time(num_reqs, num_query_heads, key_tiles, num_sms)
    return cascade < _split_keys_time(num_reqs, num_kv_heads, heads_per_kv, key_tiles, num_sms)


def _cascade_time(num_reqs: int, num_query_heads: int, key_tiles: int, num_sms: int) -> int:
    """Key tiles one after the other: a program has one head, a tile of rows and the prefix."""
    programs = num_query_heads * _ceil_div(num_reqs, TILE)
    return _ceil_div(programs, num_sms) * key_tiles


def _split_keys_time(
    num_reqs: int, num_kv_heads: int, heads_per_kv: int, key_tiles: int, num_sms: int
) -> int:
    """The same where a program has one request, one kv head and one key tile."""
    programs = num_reqs * num_kv_heads * _ceil_div(heads_per_kv, TILE) * key_tiles
    return _ceil_div(programs, num_sms)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
