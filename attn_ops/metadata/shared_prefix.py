"""A batch whose requests begin alike, as two: the shared prefix, read once, and the rest.

S requests, T rows, B block size, M blocks a request may own.
"""

import torch

from attn_ops.metadata.checks import check_int
from attn_ops.metadata.common import CommonAttentionMetadata


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
    starts_cpu = torch.tensor([0, rows], dtype=torch.int32)
    seq_cpu = torch.tensor([length], dtype=torch.int32)
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
