"""`from_lengths`: what it computes, keeps and refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_ops import PAD_SLOT_ID, CommonAttentionMetadata
from attn_ops.metadata import positions_of_step
from tests.attn_ops.metadata.ragged import int32, int64


@st.composite
def batches(draw) -> tuple[list[int], list[int], torch.Tensor, int, int]:
    """Query lengths, seq_lens, block table, block size, padding rows. Lengths include 0 and 1."""
    block_size = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=5))
    query, seq = [q for q, _ in lengths], [q + computed for q, computed in lengths]
    width = max([1, *(-(-n // block_size) for n in seq)]) + draw(st.integers(0, 2))
    blocks = draw(st.permutations(range(1, len(lengths) * width + 1)))
    table_SM = torch.tensor(blocks, dtype=torch.int32).view(len(lengths), width)
    return query, seq, table_SM, block_size, draw(st.integers(0, 4))


@settings(max_examples=100, deadline=None)
@given(batches())
def test_from_lengths(batch):
    query_lens, seq_lens, table_SM, block_size, padding = batch
    rows = sum(query_lens) + padding
    common = CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table_SM, block_size, num_padded_tokens=rows if padding else None
    )
    starts, slots, positions = [0], [], []
    for request, (query, seq) in enumerate(zip(query_lens, seq_lens, strict=True)):
        starts.append(starts[-1] + query)
        for position in range(seq - query, seq):
            block = int(table_SM[request, position // block_size])
            slots.append(block * block_size + position % block_size)
            positions.append(position)
    computed = [s - q for q, s in zip(query_lens, seq_lens, strict=True)]
    expected = {
        "query_start_loc": (starts, torch.int32),
        "query_start_loc_cpu": (starts, torch.int32),
        "seq_lens": (seq_lens, torch.int32),
        "seq_lens_cpu": (seq_lens, torch.int32),
        "num_computed_tokens_cpu": (computed, torch.int32),
        "slot_mapping": (slots + [PAD_SLOT_ID] * padding, torch.int64),
        "block_table_tensor": (table_SM.tolist(), torch.int32),
    }
    for name, (values, dtype) in expected.items():
        tensor = getattr(common, name)
        assert tensor.tolist() == values, name
        assert tensor.dtype == dtype, name
    assert common.num_reqs == len(query_lens)
    assert common.num_actual_tokens == len(slots)
    assert common.max_query_len == max([0, *query_lens])
    assert common.max_seq_len == max([0, *seq_lens])
    assert common.causal
    assert common.logits_indices is None
    got = positions_of_step(
        np.array(query_lens, dtype=np.int32), np.array(computed, np.int32), np.array(starts)
    )
    assert got.tolist() == positions


def test_from_lengths_keeps_nothing_of_its_arguments():
    """A caller reuses its arrays for the next step while this one's metadata is still in use."""
    query, seq = np.array([1, 2], dtype=np.int32), np.array([3, 2], dtype=np.int32)
    table_SM = torch.tensor([[1], [2]], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths(query, seq, table_SM, 4)
    seq.fill(0), query.fill(0), table_SM.zero_()
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == [3, 2]
    assert common.block_table_tensor.tolist() == [[1], [2]]


def table(rows: int, width: int = 2) -> torch.Tensor:
    return torch.arange(1, rows * width + 1, dtype=torch.int32).view(rows, width)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [1, 2], table(1), 4), "seq_lens must have 1 entries like query_lens, got 2"),
        (
            ([1, 3], [1, 2], table(2), 4),
            r"seq_lens must be at least query_lens, got seq_lens\[1\]=2 and query_lens",
        ),
        (([1, -1], [1, 2], table(2), 4), r"query_lens\[1\]=-1"),
        (([1], [1], table(2), 4), r"block_table must have shape \[1, any\], got \[2, 2\]"),
        (([1], [1], table(1)[0], 4), r"block_table must have shape \[1, any\], got \[2\]"),
        (
            ([1, 1], [1, 9], table(2), 4),
            r"seq_lens must fit block_table, got seq_lens\[1\]=9; supported: up to 8",
        ),
    ],
)
def test_from_lengths_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        CommonAttentionMetadata.from_lengths(*arguments)


def test_from_lengths_refuses_too_few_rows():
    with pytest.raises(ValueError, match="num_padded_tokens must be at least 3, got 2"):
        CommonAttentionMetadata.from_lengths([3], [3], table(1), 4, num_padded_tokens=2)


def test_negative_blocks_are_refused_where_tokens_stand():
    with pytest.raises(ValueError, match=r"got block_table\[1\]\[0\]=-1"):
        CommonAttentionMetadata.from_lengths([1, 1], [3, 2], [[1, -7], [-1, 2]], 4)
    table = [[1, -7], [2, -1]]  # behind the tokens anything may stand
    assert CommonAttentionMetadata.from_lengths([1, 1], [3, 2], table, 4).num_reqs == 2


from_lengths = CommonAttentionMetadata.from_lengths


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([5], [-(2**31)], [[1]], 4), "seq_lens"),
        (([1], [1], int64([[2**32 + 7]]), 4), "block_table"),
        (([1], [1], [[1.5]], 4), "block_table"),
        (([1], [1], [[1]], 4.0), "block_size"),
        (([2**31], [2**31], [[1]], 4), "query_lens"),
        (([[1]], [[1]], [[1]], 4), "query_lens"),
        (([2**30] * 2, [2**30] * 2, int32([[1], [1]]), 2**30), "query_lens"),
    ],
)
def test_from_lengths_refuses_numbers(arguments, name):
    with pytest.raises(ValueError, match=name):
        from_lengths(*arguments)


@pytest.mark.parametrize("name", ["num_padded_reqs", "num_padded_tokens"])
def test_paddings_are_ints(name):
    with pytest.raises(ValueError, match=f"{name} must be an int, got float"):
        from_lengths([1], [1], [[1]], 4, **{name: 2.0})


def test_tables_as_lists_and_arrays():
    ragged = from_lengths([1, 1], [1, 7], [[5], [6, 7]], 4)
    assert ragged.block_table_tensor.tolist() == [[5, 0], [6, 7]]
    assert ragged.slot_mapping.tolist() == [20, 30]
    array = from_lengths([1, 1], [1, 7], np.array([[5, 0], [6, 7]], dtype=np.int64), 4)
    assert array.slot_mapping.tolist() == [20, 30]
    assert from_lengths([], [], [], 4).block_table_tensor.shape == (0, 0)
