"""Batches whose attention is quantized behind."""

import pytest
import torch


@pytest.fixture
def batch(make_batch):
    """Rows of zeros, which are padding, and of NaN; 4 heads of 64 in bfloat16."""

    def make(dtype=torch.bfloat16, **sizes):
        sizes = {"head_size": 64, "num_padding_rows": 2} | sizes
        made = make_batch([3, 1, 2], [9, 5, 2], dtype=dtype, **sizes)
        made.q[1] = float("nan")
        return made

    return make
