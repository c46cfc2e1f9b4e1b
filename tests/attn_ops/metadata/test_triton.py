"""The kernels of virtual batches and logits rows against plain PyTorch."""

import numpy as np
import pytest
import torch

from attn_ops.metadata import max_local_attention_virtual_batches
from attn_ops.metadata.chunked_local import reference_virtual_batches
from attn_ops.metadata.fast_prefill import reference_logits_rows
from tests.attn_ops.metadata.ragged import int32
from tests.kit.marks import slow


def random_lengths(num_reqs: int, longest: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(seed)
    query = generator.integers(0, longest + 1, num_reqs)
    seq = query + generator.integers(0, 40, num_reqs)
    seq[generator.random(num_reqs) < 0.1] = 0  # padding with rows of its own
    return int32(np.concatenate([[0], np.cumsum(query)]).tolist()), int32(seq.tolist())


@pytest.mark.parametrize(
    ("num_reqs", "chunk", "block_size", "surplus", "max_blocks"),
    [(0, 4, 2, 5, 3), (1, 16, 1, 600, 50), (5, 140, 1, 3, 7), (3, 8, 4, 2, 0),
     *slow((300, 8, 4, 300, 20), (513, 4, 4, 0, 1))],
)  # fmt: skip
def test_virtual_batches_kernel(num_reqs, chunk, block_size, surplus, max_blocks):
    """Beyond every tile of the kernel: requests, virtual batches, blocks, surplus."""
    from attn_ops.metadata.triton.virtual_batches import launch_virtual_batches

    start, seq = random_lengths(num_reqs, 30, num_reqs)
    width = max_blocks + 3  # rows of the table need not be contiguous
    table = torch.arange(num_reqs * width, dtype=torch.int32).view(num_reqs, width)[:, :max_blocks]
    count = max_local_attention_virtual_batches(chunk, num_reqs, int(start[-1]), 30) + surplus
    results = []
    for fill in (reference_virtual_batches, launch_virtual_batches):
        shapes = ((count + 1,), (count,), (count, chunk // block_size))
        local = [torch.full(shape, 77, dtype=torch.int32) for shape in shapes]
        fill(chunk, block_size, start, seq, table, *local)
        results.append([t.tolist() for t in local])
    assert results[0] == results[1]


def test_virtual_batches_kernel_writes_every_entry_whatever_the_bound():
    from attn_ops.metadata.triton.virtual_batches import launch_virtual_batches

    local = [torch.full(shape, 77, dtype=torch.int32) for shape in ((4,), (3,), (3, 2))]
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    launch_virtual_batches(4, 2, int32([0, 4, 14, 19]), int32([6, 17, 9]), table, *local)
    assert local[0].tolist() == [0, 2, 4, 19]


MANY = pytest.param(300, 2500, marks=pytest.mark.slow)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("num_reqs", "num_rows"), [(0, 3), (1, 0), (7, 1024), (9, 1300), MANY])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_logits_rows_kernel(num_reqs, num_rows, on_device, dtype):
    from attn_ops.metadata.triton.logits_rows import launch_logits_rows

    start, _ = random_lengths(num_reqs, 12, num_rows)
    rows = torch.randint(-5, int(start[-1]) + 5, (num_rows,), dtype=dtype)
    for wanted in (0, num_rows // 2, num_rows, num_rows + 9):
        count = int32([wanted]) if on_device else wanted
        results = [torch.full_like(start, 77) for _ in range(2)]
        for compute, result in zip(
            (reference_logits_rows, launch_logits_rows), results, strict=True
        ):
            compute(start, rows, count, result)
        assert results[0].tolist() == results[1].tolist()
