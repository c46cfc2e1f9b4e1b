"""Metadata builders: what they plan, refuse, reorder and build for capture."""

import dataclasses
import types
from typing import Any

import pytest
import torch

from attn_ops import (
    AttentionSpec,
    CommonAttentionMetadata,
    get_backend,
    grouped_backend,
)
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    make_local_attention_virtual_batches,
)
from attn_ops.ops import attention, write_kv
from tests.attn_ops.metadata.ragged import int32, int64
from tests.kit.batches import build_metadata


def table(rows: int, width: int = 2) -> torch.Tensor:
    return torch.arange(1, rows * width + 1, dtype=torch.int32).view(rows, width)


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
    one = AttentionSpec(4, 2, 8, torch.float32)
    other = AttentionSpec(4, 4, 8, torch.float32, sliding_window=3)
    meta = build_metadata("TORCH", make_batch([1], [3]).common, [one, other, one], 4)
    assert list(meta.plans) == [one, other]
    wanted = "AttentionMetadata(TORCH, num_reqs=1, num_tokens=1, max_query_len=1, max_seq_len=3)"
    assert repr(meta) == wanted


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


def test_chunks_that_are_no_whole_blocks_are_refused_when_the_builder_is_made():
    """Not by every step's build, under a name that the caller has never seen."""
    backend = get_backend("TORCH")
    spec = AttentionSpec(4, 2, 32, torch.float32, attention_chunk_size=24)
    message = "attention_chunk_size must be a multiple of block_size 16, got 24"
    with pytest.raises(ValueError, match=message):
        backend.builder(backend, [spec], 16, "cpu")


@pytest.mark.parametrize("backend", ["TORCH", "TRITON"])
@pytest.mark.parametrize("feature", ["sliding_window", "attention_chunk_size"])
def test_layers_with_a_window_read_blocks_of_their_own(feature, backend):
    """Each kind of layer as if its table were the batch's; the other's blocks are NaN."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 5], [40, 20, 17]
    tables = [torch.arange(first, first + 9).view(3, 3).int() for first in (1, 20)]
    whole, own = (
        CommonAttentionMetadata.from_lengths(*lengths, one, 16, num_padded_tokens=11)
        for one in tables
    )
    common = whole.replace(
        window_block_table_tensor=own.block_table_tensor, window_slot_mapping=own.slot_mapping
    )
    specs = [AttentionSpec(4, 2, 16, torch.float32)]
    specs.append(dataclasses.replace(specs[0], **{feature: 16}))
    meta = build_metadata(backend, common, specs)
    q = torch.randn(11, 4, 16, generator=generator)
    for batch, option in ((whole, {}), (own, {feature: 16})):
        cache = torch.full((40, 2, 16, 2, 16), float("nan"))
        cache[batch.block_table_tensor.flatten().long()] = torch.randn(
            9, 2, 16, 2, 16, generator=generator
        )
        plain = build_metadata(backend, batch, specs)
        want = attention(q, cache, plain, 0.25, **option)
        assert want[:9].isfinite().all()
        assert torch.equal(attention(q, cache, meta, 0.25, **option)[:9], want[:9])


@pytest.fixture
def split() -> CommonAttentionMetadata:
    """Layers with a window have other blocks."""
    tables = table(1), table(1) + 4
    batch, own = (CommonAttentionMetadata.from_lengths([2], [7], t, 4) for t in tables)
    return batch.replace(
        window_block_table_tensor=own.block_table_tensor, window_slot_mapping=own.slot_mapping
    )


@pytest.mark.parametrize("method", ["build", "build_for_cudagraph_capture", "prepare_capture"])
def test_a_builder_that_may_leave_the_windows_out_does_not_take_them(split, method):
    """Their layers are never sent to blocks of the others."""

    def without(self, *args: Any, **keywords: Any) -> AttentionMetadata:
        return AttentionMetadata(split, self.backend, {}, self.block_size)

    base = get_backend("TORCH")
    own = type("OwnBuilder", (base.builder,), {method: without})
    assert base.builder.takes_windows
    assert not own.takes_windows
    assert type("Declared", (own,), {method: without, "takes_windows": True}).takes_windows
    backend = dataclasses.replace(base, name="OWN", builder=own)
    spec = AttentionSpec(2, 1, 8, torch.float32, sliding_window=4)
    builder = backend.builder(backend, [spec], 4, "cpu")
    arguments = (0, split) if method == "build" else (split,)
    meta = getattr(builder, method)(*arguments)
    q, cache = torch.ones(2, 2, 8), torch.ones(9, 2, 4, 1, 8)
    assert attention(q, cache, meta, 1.0).eq(1).all()
    with pytest.raises(ValueError, match="attn_metadata must be that of a builder with takes_wind"):
        attention(q, cache, meta, 1.0, sliding_window=4)


def test_grouped_builders_take_windows_if_all_groups_do(split):
    base = get_backend("TORCH")

    class OwnBuilder(base.builder):
        def build(self, *args: Any, **keywords: Any) -> Any:
            return super().build(*args, **keywords)

    other = dataclasses.replace(base, name="OTHER", builder=OwnBuilder)
    for group, takes in ((get_backend("TRITON"), True), (other, False)):
        grouped = grouped_backend({lambda spec: bool(spec.sliding_window): group}, default=base)
        assert grouped.builder.takes_windows == takes


def test_chunks_are_those_of_windows(split):
    virtual = make_local_attention_virtual_batches(4, split, 4)
    own = make_local_attention_virtual_batches(4, split.of_windows(), 4)
    assert torch.equal(virtual.block_table_tensor, own.block_table_tensor)
    assert virtual.slot_mapping is own.slot_mapping


def test_slots_of_two_kinds_must_be_given():
    batch = CommonAttentionMetadata.from_lengths([2], [2], table(1), 4)
    batch = batch.replace(
        window_block_table_tensor=batch.block_table_tensor, window_slot_mapping=batch.slot_mapping
    )
    spec = AttentionSpec(2, 1, 8, torch.float32)
    meta = build_metadata("TORCH", batch, spec, 4)
    k, cache = torch.ones(2, 1, 8), torch.zeros(9, 2, 4, 1, 8)
    with pytest.raises(ValueError, match="slot_mapping must be given where layers with a window"):
        write_kv(k, k, cache, meta)
    assert not cache.any()
    write_kv(k, k, cache, meta, slot_mapping=batch.slot_mapping)
    with pytest.raises(ValueError, match="common_prefix_len must be 0 with window_block_table"):
        build_metadata("TORCH", batch, spec, 4, common_prefix_len=1)
