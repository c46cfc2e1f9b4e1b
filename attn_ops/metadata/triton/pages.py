"""The pages of a batch, one request behind another, as FlashInfer's wrappers want them.

S requests, M blocks a request may own, B block size.
"""

import torch

from attn_ops.metadata.triton.step import ROWS, paged_kv_kernel


def launch_page_indices(
    seq_lens: torch.Tensor, block_table: torch.Tensor, num_pages: int, block_size: int
) -> torch.Tensor:
    """[num_pages] int32, on the batch's device: the physical blocks that hold tokens.

    Args:
        seq_lens: [S] int32.
        block_table: [S, M] int32.
        num_pages: sum of ceil(seq_len / B), which the host knows from its mirror.
        block_size: B.
    """
    num_reqs, max_blocks = block_table.shape
    indices = torch.empty(num_pages, dtype=torch.int32, device=seq_lens.device)
    if num_pages == 0:
        return indices
    start_loc = torch.empty(num_reqs + 1, dtype=torch.int32, device=seq_lens.device)
    with torch.cuda.device_of(seq_lens):
        paged_kv_kernel[(num_reqs,)](
            start_loc,
            indices,
            start_loc,  # stands for the last page lengths, which are not written
            seq_lens,
            block_table,
            num_reqs,
            max_blocks,
            block_table.stride(0),
            num_pages,
            BLOCK_SIZE=block_size,
            HAS_INDICES=True,
            HAS_LAST=False,
            TILE=ROWS,
        )
    return indices
