"""A batch whose requests begin alike, as two: the shared prefix, read once, and the rest.

S requests, T rows, B block size, M blocks a request may own.
"""

import numpy as np
import torch

from attn_ops.integers import cdiv
from attn_ops.metadata.common import CommonAttentionMetadata
from attn_ops.metadata.validation import check_int

MIN_PREFIX = 256
"""Shared tokens from which on vLLM considers cascade attention."""

MIN_REQUESTS = 8
"""Requests from which on vLLM considers cascade attention."""

TILE = 128
"""Rows of a query tile and keys of a key tile, in vLLM's estimate."""


def split_shared_prefix(
    common_prefix_len: int, common: CommonAttentionMetadata, block_size: int
) -> tuple[CommonAttentionMetadata, CommonAttentionMetadata]:
    """Two batches over disjoint keys; merging their results by log-sum-exp gives the batch's.

    The first has the requests' rows as one request, without causality, over the prefix; its blocks
    are those of request 0. The second has the batch's requests over the rest of their keys. Rows
    behind the last request belong to neither: both leave them zero.

    Args:
        common_prefix_len: tokens that all requests share; whole blocks of them are used. It must
            not reach into any request's query tokens.
        common: the batch; its CPU mirrors are read. Causal, without padding requests.
        block_size: B.

    Raises:
        ValueError: mirrors are missing, the batch is not causal, or a request is shorter than the
            prefix and its own query tokens.
    """
    check_int("common_prefix_len", common_prefix_len, 1)
    computed, starts = common.num_computed_tokens_cpu, common.query_start_loc_cpu
    if computed is None or starts is None:
        name = "num_computed_tokens_cpu" if computed is None else "query_start_loc_cpu"
        raise ValueError(
            f"{name} must be given with common_prefix_len {common_prefix_len}, got None"
        )
    if not common.causal:
        raise ValueError(
            f"causal must be True with common_prefix_len {common_prefix_len}, got False"
        )
    shortest = int(computed.min()) if common.num_reqs else 0
    if common_prefix_len > shortest:
        raise ValueError(
            "common_prefix_len must be at most the fewest computed tokens of a request "
            f"({shortest}), got {common_prefix_len}"
        )
    num_blocks = common_prefix_len // block_size
    length = num_blocks * block_size
    prefix = _prefix(common, int(starts[-1]), num_blocks, length)
    return prefix, _suffix(common, num_blocks, length)


def split_on_device(
    shared_lens: torch.Tensor,
    group_starts: torch.Tensor,
    common: CommonAttentionMetadata,
    block_size: int,
) -> tuple[CommonAttentionMetadata, CommonAttentionMetadata]:
    """The same of decodes, where the device holds what is shared, as in a captured step.

    The first batch has a request for each of G groups of neighbours: their rows over the prefix
    that they share. No host mirror is read.

    Args:
        shared_lens: [S] int32, tokens that a request shares with its group: the same of the whole
            group, a multiple of B, less than the request has; 0 is none.
        group_starts: [G + 1] int32, the first request of each group, and S; groups may be empty.
        common: the batch, one row a request; its `max_seq_len` bounds both batches'. Requests
            without keys may stand among the others.
        block_size: B.
    """
    table_SM = common.block_table_tensor
    num_reqs, width = table_SM.shape
    first_G = group_starts[:-1].clamp(max=num_reqs - 1)
    filled_G = group_starts[1:] > group_starts[:-1]
    prefix = CommonAttentionMetadata(
        query_start_loc=group_starts,
        query_start_loc_cpu=None,
        seq_lens=shared_lens.index_select(0, first_G) * filled_G,
        num_reqs=first_G.shape[0],
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.num_actual_tokens,
        max_seq_len=common.max_seq_len,
        block_table_tensor=table_SM.index_select(0, first_G),
        slot_mapping=common.slot_mapping,
        causal=False,
        block_size=common.block_size,
    )
    block_M = torch.arange(width, device=table_SM.device)
    block_SM = (block_M + (shared_lens // block_size).unsqueeze(1)).clamp_(max=width - 1)
    rest = common.replace(
        seq_lens=(common.seq_lens - shared_lens).clamp_(min=0),
        seq_lens_cpu=None,
        query_start_loc_cpu=None,
        num_computed_tokens_cpu=None,
        seq_lens_cpu_upper_bound=None,
        block_table_tensor=table_SM.gather(1, block_SM),
        positions=None if common.positions is None else common.positions - shared_lens,
    )
    return prefix, rest


def _prefix(
    common: CommonAttentionMetadata, rows: int, num_blocks: int, length: int
) -> CommonAttentionMetadata:
    starts_cpu = torch.tensor([0, rows], dtype=torch.int32, device="cpu")
    seq_cpu = torch.tensor([length], dtype=torch.int32, device="cpu")
    return CommonAttentionMetadata(
        query_start_loc=starts_cpu.to(common.device, non_blocking=True),
        query_start_loc_cpu=starts_cpu,
        seq_lens=seq_cpu.to(common.device, non_blocking=True),
        seq_lens_cpu=seq_cpu,
        num_reqs=1,
        num_actual_tokens=rows,
        max_query_len=rows,
        max_seq_len=length,
        block_table_tensor=common.block_table_tensor[:1, : max(num_blocks, 1)],
        slot_mapping=common.slot_mapping,
        causal=False,
        block_size=common.block_size,
    )


def _suffix(
    common: CommonAttentionMetadata, num_blocks: int, length: int
) -> CommonAttentionMetadata:
    seq_cpu, computed = common.seq_lens_cpu, common.num_computed_tokens_cpu
    return common.replace(
        seq_lens=common.seq_lens - length,
        seq_lens_cpu=None if seq_cpu is None else seq_cpu - length,
        num_computed_tokens_cpu=None if computed is None else computed - length,
        seq_lens_cpu_upper_bound=None,
        max_seq_len=common.max_seq_len - length,
        block_table_tensor=common.block_table_tensor[:, num_blocks:],
        positions=None if common.positions is None else common.positions - length,
    )


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
    key_tiles = cdiv(common_prefix_len, TILE)
    cascade = _cascade_time(num_reqs, num_query_heads, key_tiles, num_sms)
    return cascade < _split_keys_time(num_reqs, num_kv_heads, heads_per_kv, key_tiles, num_sms)


def _cascade_time(num_reqs: int, num_query_heads: int, key_tiles: int, num_sms: int) -> int:
    """Key tiles one after the other: a program has one head, a tile of rows and the prefix."""
    programs = num_query_heads * cdiv(num_reqs, TILE)
    return cdiv(programs, num_sms) * key_tiles


def _split_keys_time(
    num_reqs: int, num_kv_heads: int, heads_per_kv: int, key_tiles: int, num_sms: int
) -> int:
    """The same where a program has one request, one kv head and one key tile."""
    programs = num_reqs * num_kv_heads * cdiv(heads_per_kv, TILE) * key_tiles
    return cdiv(programs, num_sms)
