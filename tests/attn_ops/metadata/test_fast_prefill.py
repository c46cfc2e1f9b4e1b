"""Fast prefill: the batch reduced to the rows whose logits are wanted, and backends built on it."""

import dataclasses
from typing import Any

import pytest
import torch

from attn_ops import AttentionSpec, attention, get_backend
from attn_ops.metadata import (
    KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
    CommonAttentionMetadata,
    KVSharingFastPrefillMetadata,
    MetadataBuffers,
    create_fast_prefill_custom_backend,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    subclass_attention_backend,
    subclass_attention_metadata,
)
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import (
    Ragged,
    assert_fields,
    assert_is_view,
    batches,
    check,
    int32,
    int64,
    snapshot,
)


def any_rows(batch: Ragged) -> Ragged:
    """Now and then rows from anywhere in the queries, as prompt logprobs want them."""
    if batch.tape.below(3) < 2:
        return batch
    rows = [row for row in range(batch.num_tokens) if batch.tape.below(3) == 0]
    return dataclasses.replace(batch, logits_rows=rows)


def expected_of(batch: Ragged, rows: list[int]) -> dict[str, Any]:
    counts = brute_force.queries_with_logits(batch.query_lens, rows)
    return {
        "query_start_loc": brute_force.starts(counts),
        "query_start_loc_cpu": brute_force.starts(counts),
        "num_computed_tokens_cpu": [n - q for n, q in zip(batch.seq_lens, counts, strict=True)],
        "seq_lens": batch.seq_lens,
        "seq_lens_cpu": batch.seq_lens,
        "num_reqs": batch.num_reqs,
        "num_actual_tokens": len(rows),
        "max_query_len": max([0, *counts]),
        "max_seq_len": max([0, *batch.seq_lens]),
        "block_table_tensor": batch.table,
        "slot_mapping": batch.positions_and_slots[1],
        "causal": True,
        "block_size": batch.block_size,
    }


@check(batches())
def test_rows_known_on_the_host(batch):
    batch = any_rows(batch)
    known = batch.tape.pick(["by the CPU tensor", "by the mirror"])
    common = batch.common(**batch.logits_fields(on_host=known == "by the mirror"), causal=False)
    before = snapshot(common)
    got = make_kv_sharing_fast_prefill_common_attn_metadata(common)
    if max([0, *batch.query_lens]) <= 1:
        assert got is common, "a decode step stays as it is"
    else:
        assert_fields(got, **expected_of(batch, batch.logits_rows))
    assert snapshot(common) == before


@check(batches())
def test_rows_known_on_the_device(batch):
    """With `num_logits`, as in a captured step, or without the mirror: the device path."""
    batch = any_rows(batch)
    tape, rows = batch.tape, batch.logits_rows
    most_tokens = max([0, *batch.query_lens])
    fields = batch.logits_fields(on_host=False)
    if tape.below(3):
        count = tape.below(len(rows) + 1)  # a replay that wants fewer rows than were captured
        fields["num_logits"] = int32([count])
    else:
        count = len(rows)
    if "num_logits" not in fields or tape.below(2):
        fields["query_start_loc_cpu"] = None
    most_logits = tape.pick([None, None, 3, 5])
    common = batch.common(**fields, max_logits_per_req=most_logits)
    before = snapshot(common)
    got = make_kv_sharing_fast_prefill_common_attn_metadata(common)
    assert snapshot(common) == before
    if most_tokens <= 1:
        assert got is common
        return
    expected = expected_of(batch, rows[:count])
    expected |= {
        "query_start_loc_cpu": None,
        "num_computed_tokens_cpu": None,
        "num_actual_tokens": len(rows),
        "max_query_len": min(most_logits or most_tokens, most_tokens, len(rows)),
    }
    assert_fields(got, **expected)
    assert got.num_logits is common.num_logits


@check(batches())
def test_out(batch):
    on_device = bool(batch.tape.below(2))
    fields = batch.logits_fields(on_host=not on_device)
    if on_device:
        fields["num_logits"] = int32([len(batch.logits_rows)])
    out = MetadataBuffers.allocate(batch.num_reqs + batch.tape.below(2), 0, 0, "cpu")
    out.query_start_loc.fill_(77)
    got = make_kv_sharing_fast_prefill_common_attn_metadata(batch.common(**fields), out=out)
    if max([0, *batch.query_lens]) <= 1:
        assert (out.query_start_loc == 77).all()
        return
    expected = expected_of(batch, batch.logits_rows)
    assert got.query_start_loc.tolist() == expected["query_start_loc"]
    assert_is_view(got.query_start_loc, out.query_start_loc)


def worked_example(**changes: Any) -> CommonAttentionMetadata:
    table = torch.arange(18, dtype=torch.int32).view(3, 6)
    common = CommonAttentionMetadata.from_lengths([15, 5, 8], [41, 31, 40], table, 8)
    fields = {"logits_indices_padded": int64([14, 18, 19, 27, 3]), "num_logits_indices": 4}
    return common.replace(**{**fields, **changes})


def test_rows_may_be_int32():
    """The reference's worked example, with a fifth index that is padding."""
    common = worked_example(logits_indices_padded=int32([14, 18, 19, 27, 99]))
    got = make_kv_sharing_fast_prefill_common_attn_metadata(common)
    assert_fields(got, query_start_loc=[0, 1, 3, 4], num_computed_tokens_cpu=[40, 29, 39])


def test_a_replay_may_want_more_rows_than_were_captured():
    common = worked_example(num_logits=int32([5]))
    got = make_kv_sharing_fast_prefill_common_attn_metadata(common)
    assert got.query_start_loc.tolist() == [0, 2, 4, 5]
    assert got.num_computed_tokens.tolist() == [39, 29, 39]


def test_device_reads_nothing():
    """Tensors on the meta device have no values: reading one raises."""
    table = torch.ones(2, 4, dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths([5, 3], [9, 3], table, 4, device="meta").replace(
        logits_indices_padded=int64([4, 7, 0]).to("meta"), num_logits_indices=2
    )
    got = make_kv_sharing_fast_prefill_common_attn_metadata(common)
    assert got.query_start_loc.device.type == "meta"
    assert (got.query_start_loc_cpu, got.num_actual_tokens, got.max_query_len) == (None, 2, 2)
    with_mirror = make_kv_sharing_fast_prefill_common_attn_metadata(
        common.replace(logits_indices_cpu=int64([4, 7]))
    )
    assert with_mirror.query_start_loc_cpu.tolist() == [0, 1, 2]
    assert (with_mirror.num_actual_tokens, with_mirror.max_query_len) == (2, 1)


def test_mirrors_stand_alone():
    got = make_kv_sharing_fast_prefill_common_attn_metadata(worked_example())
    got.query_start_loc.add_(1)
    assert got.query_start_loc_cpu.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"logits_indices_padded": None}, "logits_indices_padded"),
        ({"num_logits_indices": None}, "num_logits_indices"),
        ({"num_logits_indices": 6}, "num_logits_indices"),
        ({"num_logits_indices": -1}, "num_logits_indices"),
        ({"logits_indices_padded": int64([14, 28, 19, 27])}, r"logits_indices_padded\[1\]"),
        ({"logits_indices_padded": int64([-1, 18, 19, 27])}, r"logits_indices_padded\[0\]"),
        ({"logits_indices_cpu": int64([14, 18, 19, 28])}, r"logits_indices"),
        ({"logits_indices_cpu": int64([14])}, "logits_indices_cpu must have num_logits_indices=4"),
    ],
)
def test_refuses_and_writes_nothing(changes, name):
    out = MetadataBuffers.allocate(3, 0, 0, "cpu")
    out.query_start_loc.fill_(77)
    with pytest.raises(ValueError, match=name):
        make_kv_sharing_fast_prefill_common_attn_metadata(worked_example(**changes), out=out)
    assert out.query_start_loc.tolist() == [77] * 4


def test_a_decode_step_needs_no_logits_rows():
    common = CommonAttentionMetadata.from_lengths([1, 1], [4, 2], int32([[1], [2]]), 4)
    assert make_kv_sharing_fast_prefill_common_attn_metadata(common) is common


@dataclasses.dataclass(frozen=True)
class OwnMetadata:
    query_start_loc: list[int]
    prefix: int
    fast: bool


class OwnBuilder:
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> OwnMetadata:
        starts = common_attn_metadata.query_start_loc.tolist()
        return OwnMetadata(starts, common_prefix_len, fast_build)


class OwnBackend:
    @staticmethod
    def get_builder_cls() -> type:
        return OwnBuilder


def test_backend_class():
    """As engines declare backends: a class with get_builder_cls."""
    backend = create_fast_prefill_custom_backend("Fast", OwnBackend)
    assert backend.__name__ == "FastOwnBackend"
    assert issubclass(backend, OwnBackend)
    assert OwnBackend.get_builder_cls() is OwnBuilder
    builder = backend.get_builder_cls()()
    assert isinstance(builder, OwnBuilder)
    common = worked_example()
    meta = builder.build(7, common, fast_build=True)
    assert (meta.query_start_loc, meta.prefix, meta.fast) == ([0, 1, 3, 4], 7, True)
    assert isinstance(meta, OwnMetadata)
    assert isinstance(meta, KVSharingFastPrefillMetadata)
    assert meta.logits_indices_padded is common.logits_indices_padded
    assert meta.num_logits_indices == 4
    assert not isinstance(OwnMetadata([], 0, False), KVSharingFastPrefillMetadata)


def test_backend_leaves_a_decode_step_as_it_is():
    common = CommonAttentionMetadata.from_lengths([1, 1], [4, 2], int32([[1], [2]]), 4)
    common.logits_indices_padded, common.num_logits_indices = int64([1, 0]), 1
    builder = create_fast_prefill_custom_backend("Fast", OwnBackend).get_builder_cls()()
    meta = builder.build(0, common)
    assert meta.query_start_loc == [0, 1, 2]
    assert (meta.logits_indices_padded.tolist(), meta.num_logits_indices) == ([1, 0], 1)


@pytest.mark.parametrize(
    ("padded", "message"),
    [
        (None, "logits_indices_padded"),
        (int64([14, 18, 19, 26]), r"must hold the last rows .*\[3\]=26 for row 27"),
    ],
)
def test_backend_needs_logits_rows(padded, message):
    builder = create_fast_prefill_custom_backend("Fast", OwnBackend).get_builder_cls()()
    with pytest.raises(ValueError, match=message):
        builder.build(0, worked_example(logits_indices_padded=padded))


def test_attention_of_the_logits_rows(make_batch):
    """The TORCH backend on the logits rows alone gives the rows that it gives on all of them."""
    batch = make_batch([5, 1, 3], [9, 4, 3])
    rows = int64([4, 5, 7, 8])
    underlying = get_backend("TORCH")
    fast = create_fast_prefill_custom_backend("FAST_", underlying)
    assert fast.name == "FAST_TORCH"
    assert underlying.name == "TORCH"
    assert fast.get_builder_cls() is not underlying.get_builder_cls()
    common = batch.common.replace(logits_indices_padded=rows, num_logits_indices=4)
    spec = AttentionSpec(4, 2, 8, torch.float32)
    meta = fast.get_builder_cls()(fast, [spec], 4, "cpu").build(0, common)
    assert isinstance(meta, KVSharingFastPrefillMetadata)
    assert meta.common.query_start_loc.tolist() == [0, 1, 2, 4]
    everything = attention(batch.q, batch.kv_cache, batch.meta, 0.3)
    got = attention(batch.q[rows], batch.kv_cache, meta, 0.3)
    torch.testing.assert_close(got, everything[rows])


def test_subclass_attention_backend():
    class OtherBuilder(OwnBuilder):
        pass

    derived = subclass_attention_backend("Other", OwnBackend, OtherBuilder)
    assert derived.__name__ == "OtherOwnBackend"
    assert derived.get_builder_cls() is derived().get_builder_cls() is OtherBuilder
    torch_backend = get_backend("TORCH")
    replaced = subclass_attention_backend("OTHER_", torch_backend, OtherBuilder)
    assert (replaced.name, replaced.get_builder_cls()) == ("OTHER_TORCH", OtherBuilder)
    assert replaced.forward is torch_backend.forward
    assert torch_backend.get_builder_cls() is not OtherBuilder


def test_subclass_attention_metadata():
    derived = subclass_attention_metadata(
        "Fast", OwnMetadata, KV_SHARING_FAST_PREFILL_METADATA_FIELDS
    )
    assert derived.__name__ == "FastOwnMetadata"
    assert issubclass(derived, OwnMetadata)
    meta = derived([0], 3, True)
    assert (meta.prefix, meta.logits_indices_padded, meta.num_logits_indices) == (3, None, 0)
    other = derived([0], 3, True, logits_indices_padded=int64([1]), num_logits_indices=1)
    assert other.logits_indices_padded.tolist() == [1]
    for base in (OwnMetadata, dataclasses.make_dataclass("Thawed", ["prefix"])):
        made = subclass_attention_metadata("Fast", base, KV_SHARING_FAST_PREFILL_METADATA_FIELDS)
        assert made.__dataclass_params__.frozen is base.__dataclass_params__.frozen
    assert [name for name, _, _ in KV_SHARING_FAST_PREFILL_METADATA_FIELDS] == [
        "logits_indices_padded", "num_logits_indices",
    ]  # fmt: skip


def test_a_bound_on_logits_of_a_request_is_at_most_its_rows():
    common = CommonAttentionMetadata.from_lengths([1, 2], [5, 2], [[1, 2], [3, 4]], 4)
    common.logits_indices_padded, common.num_logits_indices = int64([0, 1, 2]), 3
    common.max_logits_per_req, common.query_start_loc_cpu = 50, None
    assert make_kv_sharing_fast_prefill_common_attn_metadata(common).max_query_len == 2
