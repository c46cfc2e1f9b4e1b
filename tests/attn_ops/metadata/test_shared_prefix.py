"""The split of a batch at a prefix that its requests share."""

import dataclasses

import numpy as np
import pytest
import torch

from attn_ops import (
    AttentionMetadata,
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
    get_backend,
)
from attn_ops.backends import flash_attn
from attn_ops.backends.base import AttentionOptions
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
    "groups",
    [[(0, 3, 0)], [(0, 3, 4)], [(0, 3, 12)], [(0, 2, 8), (2, 3, 0)], [(0, 1, 0), (1, 3, 16)],
     [(0, 2, 4), (2, 2, 0), (2, 3, 8)]],
)  # fmt: skip
def test_the_device_may_hold_what_is_shared(groups):
    """Decodes, one of them of padding, by cascade: as plain attention, where a row has keys."""
    spec, backend = AttentionSpec(2, 1, 8, torch.float64), get_backend("TORCH")
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(40, 2, 4, 1, 8, dtype=torch.float64, generator=generator)
    q = torch.randn(4, 2, 8, dtype=torch.float64, generator=generator)
    table, shared_lens = torch.arange(1, 33).int().view(4, 8), torch.zeros(4).int()
    for begin, end, length in groups:
        table[begin:end, : length // 4] = table[begin, : length // 4].clone()
        shared_lens[begin:end] = length
    common = CommonAttentionMetadata.from_lengths([1] * 4, [13, 20, 32, 1], table, 4)
    common = common.replace(seq_lens=torch.tensor([13, 20, 32, 0], dtype=torch.int32))
    builder = backend.builder(backend, [spec], 4, "cpu")
    starts = torch.tensor([*(begin for begin, _, _ in groups), 3, 4, 4]).int()
    want = attention(q, cache, builder.build(0, common), 0.3)
    got = attention(q, cache, builder.build_cascade(common, shared_lens, starts), 0.3)
    torch.testing.assert_close(got[:3], want[:3], rtol=1e-6, atol=1e-6)
    assert got.isfinite().all()


def test_what_cannot_be_taken_apart_on_the_device_is_refused(monkeypatch):
    spec, backend = AttentionSpec(2, 1, 8, torch.float64), get_backend("TORCH")
    common = CommonAttentionMetadata.from_lengths([1], [13], [[1, 2, 3, 4]], 4)
    builder, shared = backend.builder(backend, [spec], 4, "cpu"), torch.tensor([4]).int()
    asked = shared, torch.tensor([0, 1]).int()
    windows = common.replace(
        window_block_table_tensor=common.block_table_tensor,
        window_slot_mapping=common.slot_mapping,
    )
    with pytest.raises(ValueError, match="shared_lens must be None with window_block_table_tensor"):
        builder.build_cascade(windows, *asked)
    two_rows = CommonAttentionMetadata.from_lengths([2], [13], [[1, 2, 3, 4]], 4)
    for batch_of, lens in ((two_rows, shared), (common, torch.tensor([4, 4]).int())):
        with pytest.raises(ValueError, match=r"shared_lens must be \[1\] of requests with one row"):
            builder.build_cascade(batch_of, lens, asked[1])
    monkeypatch.setattr(type(builder), "needs_mirrors", True)
    with pytest.raises(ValueError, match="got a tensor; it needs the lengths on the host"):
        builder.build_cascade(common, *asked)


def test_fa2_says_as_others_do_that_rows_saw_no_key(monkeypatch):
    """It marks them, and rows of NaN, by +inf: rows of a group that shares nothing would be NaN."""
    inf, nan = float("inf"), float("nan")

    def fa2(q, out, **arguments):
        out[:] = torch.tensor([0.5, 0.0, nan])[:, None, None]
        return out, torch.tensor([[1.5, inf, inf]] * 4)

    monkeypatch.setattr(flash_attn, "fa_version", lambda: 2)
    monkeypatch.setattr(flash_attn, "varlen_function", lambda: fa2)
    lse, common = (
        torch.empty(3, 4),
        CommonAttentionMetadata.from_lengths([1] * 3, [4] * 3, [[1]] * 3, 4),
    )
    meta = AttentionMetadata(common, flash_attn.BACKEND, block_size=4)
    q, cache = torch.zeros(3, 4, 64), torch.zeros(2, 2, 4, 2, 64)
    flash_attn.forward(q, cache, meta, AttentionOptions(0.3, lse=lse))
    assert lse.tolist() == [[1.5] * 4, [-inf] * 4, [inf] * 4]


LLAMA_8B = (32, 8)
"""Query and kv heads; an H100 has 132 multiprocessors."""


def pays(length, query_lens, heads=LLAMA_8B, features=(False, False, False), num_sms=132):
    arguments = length, np.array(query_lens), *heads, *features, num_sms
    return builder_of().use_cascade_attention(*arguments)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((256, [2] * 8), True),
        ((255, [2] * 8), False),
        ((256, [2] * 7), False),
        ((256, [1] * 7 + [5]), True),
        ((256, [1] * 8, (32, 32)), True),
        ((256, [1] * 7, (32, 32)), False),
    ],
    ids=["least", "short", "few", "mixed", "no groups", "no groups, few"],
)
def test_batches_without_the_estimate(arguments, wanted):
    """Longer queries, or one query head a kv head: length and number alone decide."""
    assert pays(*arguments) is wanted


@pytest.mark.parametrize("feature", range(3), ids=["alibi", "sliding window", "local attention"])
def test_layers_must_see_all_keys(feature):
    assert pays(256, [2] * 8, features=tuple(i == feature for i in range(3))) is False


@pytest.mark.parametrize(
    ("length", "num_reqs", "heads", "num_sms", "wanted"),
    [
        # 2 key tiles. Cascade: 32 programs, 1 wave of 2. Split: 8 * 8 * 2 = 128 programs, 1 wave.
        (256, 8, LLAMA_8B, 132, False),
        # Split: 16 * 8 * 2 = 256, 2 waves; 17: 272, 3 waves.
        (256, 16, LLAMA_8B, 132, False),
        (256, 17, LLAMA_8B, 132, True),
        # 3 key tiles from 257 on. Split: 17 * 8 * 3 = 408, 4 waves; 16: 384, 3 waves.
        (257, 17, LLAMA_8B, 132, True),
        (257, 16, LLAMA_8B, 132, False),
        # 16 key tiles. Split: 16 * 8 * 16 = 2,048, 16 waves; 17: 2,176, 17 waves.
        (2048, 16, LLAMA_8B, 132, False),
        (2048, 17, LLAMA_8B, 132, True),
        # Cascade: 32 heads on 31 multiprocessors, 2 waves of 2. Split: 8: 128, 5 waves.
        (256, 8, LLAMA_8B, 31, True),
        # 129 rows are 2 query tiles: 64 programs on 32, 2 waves of 2. Split: 129 * 2 = 258, 9.
        (256, 129, (32, 1), 32, True),
        # 200 heads of a kv head are 2 query tiles. Cascade: 200 programs, 2 waves of 2.
        # Split: 100 * 2 * 2 = 400, 4 waves; 101: 404, 5 waves.
        (256, 100, (200, 1), 100, False),
        (256, 101, (200, 1), 100, True),
    ],
)
def test_single_token_batches_by_the_estimate(length, num_reqs, heads, num_sms, wanted):
    assert pays(length, [1] * num_reqs, heads, num_sms=num_sms) is wanted


@pytest.mark.parametrize("missing", ["lse", "non_causal"])
def test_a_backend_must_be_able_to(missing):
    backend = get_backend("TORCH")
    unable = dataclasses.replace(
        backend, support=dataclasses.replace(backend.support, **{missing: False})
    )
    builder = unable.builder(unable, [AttentionSpec(4, 2, 8, torch.float32)], 4, "cpu")
    args = (256, np.array([2] * 8), *LLAMA_8B, False, False, False, 132)
    assert builder.use_cascade_attention(*args) is False
