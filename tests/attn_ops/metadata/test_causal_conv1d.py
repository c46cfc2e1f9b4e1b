"""Shapes for speculative decoding, programs of a causal convolution, cache layouts, the builder."""

import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_ops import AttentionSpec, get_backend
from attn_ops.metadata import (
    PAD_SLOT_ID,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCacheLayoutType,
    compute_causal_conv1d_metadata,
    get_kv_cache_layout,
    is_valid_kv_cache_layout,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    set_kv_cache_layout,
)
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import Tape, batches, check, int32, int64


@check(batches())
def test_reshape_for_spec_decode(batch):
    """Row r * Q + t of the query is token t of request r, and back."""
    tape = batch.tape
    num_reqs, query_len = tape.below(5), tape.below(5)
    rows = brute_force.flat_rows(num_reqs, query_len)
    heads, size = 1 + tape.below(3), 1 + tape.below(3)
    query = torch.tensor([10 * r + t for r, t in rows], dtype=torch.float64)
    query_TNH = (query[:, None, None] + torch.zeros(heads, size)).contiguous()
    got = reshape_query_for_spec_decode(query_TNH, num_reqs)
    assert got.shape == (num_reqs, query_len if num_reqs else 0, heads, size)
    for r, t in rows:
        assert (got[r, t] == 10 * r + t).all()
    back = reshape_attn_output_for_spec_decode(got)
    assert back.shape == query_TNH.shape
    assert torch.equal(back, query_TNH)
    if rows:
        assert got.data_ptr() == back.data_ptr() == query_TNH.data_ptr(), "views"


def test_reshape_refuses():
    query = torch.zeros(6, 2, 4)
    assert reshape_attn_output_for_spec_decode(query) is query
    for batch_size in (4, 0, -1, -2):
        with pytest.raises(ValueError, match="batch_size"):
            reshape_query_for_spec_decode(query, batch_size)
    for wrong in (query[0], query[None]):
        with pytest.raises(ValueError, match="query"):
            reshape_query_for_spec_decode(wrong, 1)
    for wrong in (query[0], query[None, None]):
        with pytest.raises(ValueError, match="attn_output"):
            reshape_attn_output_for_spec_decode(wrong)


def assert_programs(got: tuple, query_lens: list[int]) -> None:
    nums_dict, batch_ptr, chunk_ptr = got
    requests, offsets = brute_force.conv1d_chunks(query_lens, 8)
    assert list(nums_dict) == [8]
    programs = nums_dict[8]
    assert programs["nums"].tolist() == [requests.count(r) for r in range(len(query_lens))]
    assert programs["tot"] == programs["mlist_len"] == len(requests)
    assert type(programs["tot"]) is type(programs["mlist_len"]) is int
    assert programs["mlist"].tolist() == requests
    assert programs["offsetlist"].tolist() == offsets
    assert programs["batch_ptr"] is batch_ptr
    assert programs["token_chunk_offset_ptr"] is chunk_ptr
    for pointer, values in ((batch_ptr, requests), (chunk_ptr, offsets)):
        assert pointer.dtype == torch.int32
        assert pointer[: len(values)].tolist() == values
        assert (pointer[len(values) :] == PAD_SLOT_ID).all()


@check(batches())
def test_causal_conv1d(batch):
    """Longer queries than elsewhere: times 1 to 4."""
    query_lens = [query * (1 + batch.tape.below(4)) for query in batch.query_lens]
    starts = brute_force.starts(query_lens)
    tensor, keywords = int32(starts), {}
    if batch.tape.below(3) == 2:
        size = len(brute_force.conv1d_chunks(query_lens, 8)[0]) + batch.tape.below(3)
        keywords["out"] = torch.full((2, size), 77, dtype=torch.int32).unbind()
    if batch.tape.below(2):
        keywords["query_start_loc_cpu"] = int32(starts)
    got = compute_causal_conv1d_metadata(tensor, **keywords)
    assert_programs(got, query_lens)
    if "out" in keywords:
        for given, pointer in zip(keywords["out"], got[1:], strict=True):
            assert given.data_ptr() == pointer.data_ptr()
    else:
        assert got[1].shape == got[2].shape == (2048,)
    assert tensor.tolist() == starts


def test_causal_conv1d_of_many_tokens():
    """More than 1024 programs: room for twice as many."""
    query_lens = [8 * 700 + 1, 0, 8 * 400, 3]
    got = compute_causal_conv1d_metadata(int32(brute_force.starts(query_lens)))
    assert_programs(got, query_lens)
    assert got[1].shape == got[2].shape == (2 * (701 + 400 + 1),)


def test_causal_conv1d_does_not_read_the_device():
    with pytest.raises(ValueError, match="query_start_loc_cpu"):
        compute_causal_conv1d_metadata(int32([0, 9]).to("meta"))
    nums_dict, batch_ptr, _ = compute_causal_conv1d_metadata(
        int32([0, 9]).to("meta"), query_start_loc_cpu=int32([0, 9])
    )
    assert nums_dict[8]["mlist"].tolist() == [0, 0]
    assert batch_ptr.device.type == "meta"


def test_causal_conv1d_refuses_short_buffers():
    out = int32([77, 77]), int32([77])
    with pytest.raises(ValueError, match="out"):
        compute_causal_conv1d_metadata(int32([0, 9]), out=out)
    assert [tensor.tolist() for tensor in out] == [[77, 77], [77]]


@pytest.fixture
def layout() -> Iterator[None]:
    yield
    set_kv_cache_layout(None)


@pytest.mark.usefixtures("layout")
def test_kv_cache_layout():
    """The argument wins over the setting, the setting over the default."""
    assert typing.get_args(KVCacheLayoutType) == ("NHD", "HND")
    assert get_kv_cache_layout() == "NHD"
    assert get_kv_cache_layout("HND") == "HND"
    set_kv_cache_layout("HND")
    assert get_kv_cache_layout() == "HND"
    assert get_kv_cache_layout("NHD") == "NHD"
    set_kv_cache_layout("NHD")
    assert get_kv_cache_layout() == "NHD"
    set_kv_cache_layout("HND")
    for call in (set_kv_cache_layout, get_kv_cache_layout):
        with pytest.raises(ValueError, match="cache_layout"):
            call("DNH")
    assert get_kv_cache_layout() == "HND", "a refused name changes nothing"
    set_kv_cache_layout(None)
    assert get_kv_cache_layout() == "NHD"
    names = ("NHD", "HND", "nhd", "", "NH")
    assert [is_valid_kv_cache_layout(n) for n in names] == [True, True, False, False, False]


def test_constants():
    assert PAD_SLOT_ID == -1
    assert {level.name: level.value for level in AttentionCGSupport} == {
        "ALWAYS": 3, "UNIFORM_BATCH": 2, "UNIFORM_SINGLE_TOKEN_DECODE": 1, "NEVER": 0,
    }  # fmt: skip


class RecordingBuilder(AttentionMetadataBuilder):
    """Builds nothing and remembers how it was asked."""

    def plan(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> Any:
        return None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> tuple:
        return common_prefix_len, common_attn_metadata, fast_build


def make_builder(device: str = "cpu", **keywords: Any) -> RecordingBuilder:
    spec = AttentionSpec(4, 2, 64, torch.float32)
    return RecordingBuilder(get_backend("TORCH"), [spec], 16, device, **keywords)


def test_builder_builds_for_capture_and_drafts():
    builder = make_builder(layer_names=["a", "b"])
    common = CommonAttentionMetadata.from_lengths([1], [4], int32([[1]]), 16)
    assert list(builder.layer_names) == ["a", "b"]
    assert builder.build(5, common) == (5, common, False)
    assert builder.build_for_cudagraph_capture(common) == (0, common, False)
    assert builder.build_for_drafting(common, 2) == (0, common, True)
    assert builder.cudagraph_support == AttentionCGSupport.NEVER
    shared = builder.use_cascade_attention(64, int64([1]).numpy(), 4, 2, False, False, False, 108)
    assert shared is False


def test_layers_are_named_that_the_backend_cannot_take():
    for names, named in (
        (["first", "second"], "take first, second: "),
        ([], "take these layers: "),
    ):
        with pytest.raises(ValueError, match=named):
            make_builder("meta", layer_names=names)


def test_a_fast_build_is_a_build():
    """The flag is vLLM's; code written against its builders passes it."""
    backend = get_backend("TORCH")
    builder = backend.builder(backend, [AttentionSpec(4, 2, 64, torch.float32)], 16, "cpu")
    common = CommonAttentionMetadata.from_lengths([1, 3], [4, 3], int32([[1], [2]]), 16)
    one, other = (builder.build(0, common, fast_build=fast) for fast in (False, True))
    assert (one.common, one.backend, one.plans) == (other.common, other.backend, other.plans)


@pytest.mark.parametrize(
    ("num_speculative_tokens", "arguments", "expected"),
    [
        (None, (), 1),
        (None, (4,), 4),
        (None, (1, True), 1),
        (3, (1, True), 4),
        (3, (7, True), 4),
        (3, (1, False), 1),
        (0, (5, True), 1),
        (3, (None, True), None),
    ],
)
def test_reorder_batch_threshold(num_speculative_tokens, arguments, expected):
    builder = make_builder(num_speculative_tokens=num_speculative_tokens)
    assert builder.reorder_batch_threshold is None
    builder._init_reorder_batch_threshold(*arguments)
    assert builder.reorder_batch_threshold == expected
    assert RecordingBuilder.reorder_batch_threshold is None, "set on the instance alone"


def test_builder_reorders_by_its_threshold():
    swaps = []
    order = types.SimpleNamespace(req_ids=["p", "d"], swap_states=lambda *pair: swaps.append(pair))
    schedule = types.SimpleNamespace(num_scheduled_tokens={"p": 9, "d": 2})
    builder = make_builder()
    builder._init_reorder_batch_threshold(1)
    assert builder.reorder_batch(order, schedule) is False
    builder._init_reorder_batch_threshold(2)
    assert builder.reorder_batch(order, schedule) is True
    assert swaps == [(0, 1)]


def test_tape_ends_with_first_choices():
    """The strategies themselves: what is drawn is what the bytes say."""
    tape = Tape(bytes([7, 2]))
    assert [tape.below(5), tape.pick("abc"), tape.below(9), tape.pick("abc")] == [2, "c", 0, "a"]
