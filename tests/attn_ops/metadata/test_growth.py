"""Steps leave nothing behind."""

import gc
import tracemalloc

import pytest

from attn_ops.metadata import (
    CommonAttentionMetadata,
    MetadataBuffers,
    make_local_attention_virtual_batches,
)
from tests.attn_ops.metadata.ragged import int32


@pytest.mark.slow
def test_building_steps_keeps_no_memory():
    query, seq = [1, 1, 5], [9, 1, 5]
    out = MetadataBuffers.allocate(3, 7, 3, "cpu")
    out.block_table.copy_(int32([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))

    def run(count: int) -> None:
        for _ in range(count):
            common = CommonAttentionMetadata.from_lengths(query, seq, out.block_table, 4, out=out)
            make_local_attention_virtual_batches(8, common)

    tracemalloc.start()
    try:
        run(100)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        run(3_000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # One object kept a step would be 150 kB; what other threads of the process allocate counts too.
    assert grown < 50_000, f"{grown} bytes in 3,000 steps"
