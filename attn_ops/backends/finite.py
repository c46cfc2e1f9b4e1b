"""Values whose NaN and inf stay with the rows that see them.

A masked key weighs 0, and 0 times NaN is NaN. Kernels whose tiles hold keys of several requests
would so hand one request's NaN to the others.
"""

import torch


def finite_values(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [..., H], where values that are not finite are 0 and their key is NaN instead.

    A row that sees the key is NaN as before: its score is. A mask replaces the score of every
    other row.
    """
    lost = ~v.isfinite().all(-1, keepdim=True)
    return torch.where(lost, torch.nan, k), torch.where(lost, 0, v)
