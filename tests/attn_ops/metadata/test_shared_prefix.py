"""The split of a batch at a prefix that its requests share."""

import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, get_backend
from attn_ops.metadata.shared_prefix import split_shared_prefix

TABLE = [[7, 3, 9, 1], [7, 3, 2, 8]]


def batch(query=(2, 1), seq=(12, 9)) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(query, seq, TABLE, 4, num_padded_tokens=5)


def test_prefix_is_one_request_and_the_rest_the_batch_without_it():
    prefix, rest = split_shared_prefix(8, batch(), 4)
    assert prefix.query_start_loc.tolist() == [0, 3]
    assert prefix.seq_lens.tolist() == [8]
    assert prefix.block_table_tensor.tolist() == [[7, 3]]
    assert (prefix.num_reqs, prefix.max_query_len, prefix.max_seq_len) == (1, 3, 8)
    assert prefix.causal is False
    assert rest.query_start_loc.tolist() == [0, 2, 3]
    assert rest.seq_lens.tolist() == [4, 1]
    assert rest.seq_lens_cpu is not None
    assert rest.seq_lens_cpu.tolist() == [4, 1]
    assert rest.num_computed_tokens_cpu is not None
    assert rest.num_computed_tokens_cpu.tolist() == [2, 0]
    assert rest.block_table_tensor.tolist() == [[9, 1], [2, 8]]
    assert rest.max_seq_len == 4


def test_rows_behind_the_last_request_are_not_of_the_prefix():
    """`num_actual_tokens` may count them."""
    prefix, rest = split_shared_prefix(8, batch().replace(num_actual_tokens=5), 4)
    assert prefix.query_start_loc.tolist() == [0, 3]
    assert (prefix.num_actual_tokens, prefix.max_query_len) == (3, 3)
    assert rest.num_actual_tokens == 5


def test_a_prefix_is_cut_to_whole_blocks():
    prefix, rest = split_shared_prefix(7, batch(), 4)
    assert prefix.seq_lens.tolist() == [4]
    assert rest.seq_lens.tolist() == [8, 5]


@pytest.mark.parametrize(
    ("length", "changes", "message"),
    [
        (9, {}, r"fewest computed tokens of a request \(8\), got 9"),
        (0, {}, "common_prefix_len must be"),
        (4, {"causal": False}, "causal must be True with common_prefix_len 4"),
        (4, {"num_computed_tokens_cpu": None}, "num_computed_tokens_cpu must be given"),
        (4, {"query_start_loc_cpu": None}, "query_start_loc_cpu must be given"),
    ],
)
def test_refusals(length, changes, message):
    with pytest.raises(ValueError, match=message):
        split_shared_prefix(length, batch().replace(**changes), 4)


def builder_of(**geometry):
    spec = AttentionSpec(4, 2, 8, torch.float32, **geometry)
    backend = get_backend("TORCH")
    return backend.builder(backend, [spec], 4, "cpu")


def test_a_prefix_of_no_whole_block_is_no_cascade():
    assert builder_of().build(3, batch()).views.cascade is None


def test_layers_that_do_not_see_all_keys_are_not_cascaded():
    meta = builder_of(sliding_window=3).build(8, batch())
    assert meta.views.cascade is not None
    assert not meta.views.cascade[0].plans
    assert len(meta.plans) == 1


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size must be None or at least 1, got 0"),
        (
            {"attention_chunk_size": 8, "sliding_window": 3},
            "sliding_window must be None with attention_chunk_size 8, got 3",
        ),
        (
            {"attention_chunk_size": 8, "causal": False},
            "causal must be True with attention_chunk_size 8, got False",
        ),
    ],
)
def test_geometry_of_chunked_layers(geometry, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(4, 2, 8, torch.float32, **geometry)


def test_a_chunk_must_hold_whole_blocks():
    message = "attention_chunk_size must be a multiple of block_size 4, got 6"
    with pytest.raises(ValueError, match=message):
        builder_of(attention_chunk_size=6)
