"""Where a batch's decodes end and its prefills begin.

S requests; decodes have at most `decode_threshold` query tokens and stand first.
"""

import numpy as np

from attn_ops.metadata.common import CommonAttentionMetadata


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """The boundary between decodes and prefills of a batch whose decodes stand first.

    Args:
        common_attn_metadata: the batch; its query_start_loc_cpu is read.
        decode_threshold: the longest query that counts as a decode.
        require_uniform: decodes must have one query length; the first request of another length and
            all behind it count as prefills, however short. A batch whose num_actual_tokens is
            padded to one query length for every request is all decodes, those of 0 tokens too.

    Returns:
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens. Padding rows that
        num_actual_tokens counts belong to the last kind.

    Raises:
        ValueError: query_start_loc_cpu is needed and not there.
    """
    num_reqs = common_attn_metadata.num_reqs
    num_tokens = common_attn_metadata.num_actual_tokens
    all_decodes = (num_reqs, 0, num_tokens, 0)
    uniform = require_uniform and decode_threshold > 1
    if num_reqs == 0 or (common_attn_metadata.max_query_len <= decode_threshold and not uniform):
        return all_decodes
    if common_attn_metadata.query_start_loc_cpu is None:
        raise ValueError("query_start_loc_cpu must be given to split a mixed batch, got None")
    start = common_attn_metadata.query_start_loc_cpu.numpy()
    query = np.diff(start)
    if query[0] > decode_threshold:
        return 0, num_reqs, 0, num_tokens
    if not require_uniform:
        is_prefill = query > decode_threshold
    elif num_tokens == num_reqs * query[0] and ((query == query[0]) | (query == 0)).all():
        return all_decodes
    else:
        is_prefill = query != query[0]
    if not is_prefill.any():
        return all_decodes
    num_decodes = int(is_prefill.argmax())
    num_decode_tokens = int(start[num_decodes])
    return num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens
