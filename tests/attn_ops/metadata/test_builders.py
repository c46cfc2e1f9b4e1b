"""A batch's metadata against a loop over tokens, and every error of its validation."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_ops import PAD_SLOT_ID, AttentionSpec, CommonAttentionMetadata, get_backend
from attn_ops.metadata import positions_of_step


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


@pytest.fixture(scope="module")
def common() -> CommonAttentionMetadata:
    made = CommonAttentionMetadata.from_lengths([1, 2], [5, 2], table(2), 4)
    return dataclasses.replace(made, logits_indices=torch.tensor([0, 2]))


TENSORS = {
    "query_start_loc": (torch.int32, 3),
    "query_start_loc_cpu": (torch.int32, 3),
    "seq_lens": (torch.int32, 2),
    "seq_lens_cpu": (torch.int32, 2),
    "num_computed_tokens_cpu": (torch.int32, 2),
    "block_table_tensor": (torch.int32, None),
    "slot_mapping": (torch.int64, None),
    "logits_indices": (torch.int64, None),
}


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_dtype(common, name):
    other = torch.int64 if TENSORS[name][0] == torch.int32 else torch.int32
    with pytest.raises(
        ValueError, match=f"^{name} must have dtype {TENSORS[name][0]}, got {other}"
    ):
        dataclasses.replace(common, **{name: getattr(common, name).to(other)})


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_rank_and_length(common, name):
    right = getattr(common, name)
    with pytest.raises(ValueError, match=f"^{name} must have shape"):
        dataclasses.replace(common, **{name: right.unsqueeze(-1)})
    if TENSORS[name][1] is not None:
        with pytest.raises(ValueError, match=rf"^{name} must have shape \[{TENSORS[name][1]}\]"):
            dataclasses.replace(common, **{name: torch.cat([right, right[:1]])})


@pytest.mark.parametrize("name", [n for n in TENSORS if n != "seq_lens"])
def test_wrong_device(common, name):
    with pytest.raises(ValueError, match=f"^{name} must be on cpu, got meta"):
        dataclasses.replace(common, **{name: getattr(common, name).to("meta")})


def test_the_device_is_that_of_seq_lens(common):
    with pytest.raises(ValueError, match=r"^query_start_loc must be on meta, got cpu"):
        dataclasses.replace(common, seq_lens=common.seq_lens.to("meta"))


def test_block_table_has_a_row_a_request(common):
    with pytest.raises(
        ValueError, match=r"^block_table_tensor must have shape \[2, any\], got \[3, 2\]"
    ):
        dataclasses.replace(common, block_table_tensor=table(3))


@pytest.mark.parametrize(("name", "device"), [("TORCH", "cpu"), ("TRITON", "cpu")])
def test_builders_refuse_another_device(name, device):
    backend = get_backend(name)
    builder = backend.builder(backend, [AttentionSpec(4, 2, 64, torch.float32)], 16, device)
    elsewhere = CommonAttentionMetadata.from_lengths([1], [1], table(1), 16, device="meta")
    with pytest.raises(ValueError, match="common must be on cpu, got meta"):
        builder.build(0, elsewhere)
    with pytest.raises(ValueError, match="common must be on cpu, got meta"):
        builder.build_for_cudagraph_capture(elsewhere)


def test_builders_plan_once_a_geometry(make_batch):
    backend = get_backend("TORCH")
    one, other = (
        AttentionSpec(4, 2, 8, torch.float32),
        AttentionSpec(4, 4, 8, torch.float32, sliding_window=3),
    )
    meta = backend.builder(backend, [one, other, one], 4, "cpu").build(
        0, make_batch([1], [3]).common
    )
    assert list(meta.plans) == [one, other]
    assert (
        repr(meta)
        == "AttentionMetadata(TORCH, num_reqs=1, num_tokens=1, max_query_len=1, max_seq_len=3)"
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 3), (4, 0), (1, 2)])
def test_heads_must_group(num_heads, num_kv_heads):
    with pytest.raises(
        ValueError, match=f"num_heads must be a multiple of num_kv_heads, got {num_heads}"
    ):
        AttentionSpec(num_heads, num_kv_heads, 8, torch.float32)


def test_negative_blocks_are_refused_where_tokens_stand():
    with pytest.raises(ValueError, match=r"got block_table\[1\]\[0\]=-1"):
        CommonAttentionMetadata.from_lengths([1, 1], [3, 2], [[1, -7], [-1, 2]], 4)
    table = [[1, -7], [2, -1]]  # behind the tokens anything may stand
    assert CommonAttentionMetadata.from_lengths([1, 1], [3, 2], table, 4).num_reqs == 2
