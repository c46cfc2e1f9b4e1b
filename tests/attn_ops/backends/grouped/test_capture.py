"""What groups of layers say and do about a capture: levels, hooks, and who runs a call."""

import dataclasses

import pytest
import torch

from attn_ops import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    attention,
    get_backend,
    grouped_backend,
)
from attn_ops.backends import auto
from attn_ops.backends.grouped import levels, runs_on
from tests.attn_ops.backends.grouped.grouped_layers import (
    CAPPED,
    CHUNKED,
    FULL,
    LAYERS,
    SCALE,
    SLIDING,
    TORCH,
    Level,
    built,
    check,
    is_sliding,
    mixed_batch,
    three_groups,
)


@pytest.fixture
def three():
    return three_groups()


class OnHost(AttentionMetadataBuilder):
    """Plans on the host; writes down what it is asked."""

    plans_on_host = True
    reorder_batch_threshold = 1
    events: list

    def prepare_capture(self, common):
        metadata = self.build(0, common)
        self.events.append(("capture", metadata))
        return metadata

    def prepare_replay(self, metadata, common):
        self.events.append(("replay", metadata, common))


class InGraph(AttentionMetadataBuilder):
    def plan(self, spec, common):
        return common.seq_lens * 2


def fake(name, level, builder=AttentionMetadataBuilder):
    support = dataclasses.replace(TORCH.support, cudagraph=level)
    return dataclasses.replace(TORCH, name=name, support=support, builder=builder)


def decode(num_reqs=2, query_len=1):
    table = torch.arange(num_reqs, dtype=torch.int32)[:, None]
    return CommonAttentionMetadata.from_lengths([query_len] * num_reqs, [7] * num_reqs, table, 16)


@pytest.fixture
def on_host():
    return type("OnHost", (OnHost,), {"events": []})


def test_hooks_of_groups_that_plan_on_the_host(on_host):
    single = Level.UNIFORM_SINGLE_TOKEN_DECODE
    planned = fake("HOST", single, on_host)
    backend = grouped_backend({SLIDING: planned, CAPPED: "FLEX"}, default="TRITON")
    assert backend.builder.plans_on_host
    builder = backend.builder(backend, list(LAYERS), 16, "cpu")
    assert builder.reorder_batch_threshold == 1
    common = decode()
    meta = builder.prepare_capture(common)
    ((_, part),) = on_host.events
    assert meta.plans[SLIDING] is part
    assert meta.views.prepared == {"HOST": part}
    replayed = decode()
    builder.prepare_replay(meta, replayed)
    assert on_host.events[1:] == [("replay", part, replayed)]
    assert runs_on(meta, FULL).name == "TRITON"
    assert builder.prepare_capture(decode(query_len=3)) is None, "too weak for the batch"
    with pytest.raises(ValueError, match="metadata must come from prepare_capture"):
        builder.prepare_replay(builder.build(0, common), common)


def test_nothing_is_prepared_where_all_plan_in_the_graph():
    backend = grouped_backend({SLIDING: fake("A", Level.ALWAYS, InGraph)}, default="TRITON")
    builder = backend.builder(backend, list(LAYERS), 16, "cpu")
    assert not backend.builder.plans_on_host
    assert builder.prepare_capture(decode()) is None
    with pytest.raises(ValueError, match="metadata must come from prepare_capture"):
        builder.prepare_replay(builder.build(0, decode()), decode())


@pytest.mark.parametrize(
    ("builder", "specs", "refused"),
    [
        (InGraph, [FULL, SLIDING], True),
        (AttentionMetadataBuilder, [FULL, SLIDING], False),
        (AttentionMetadataBuilder, [FULL, SLIDING, CHUNKED], True),
    ],
)
def test_plans_in_the_graph_beside_plans_on_the_host(on_host, builder, specs, refused):
    """Metadata that is made before the capture leaves no place for them: they would be frozen."""
    groups = {SLIDING: fake("HOST", Level.UNIFORM_SINGLE_TOKEN_DECODE, on_host)}
    backend = grouped_backend(groups, default=fake("DEVICE", Level.ALWAYS, builder))
    made = backend.builder(backend, specs, 16, "cpu")
    if refused:
        with pytest.raises(ValueError, match="group DEVICE must plan nothing in a captured graph"):
            made.prepare_capture(decode())
    else:
        assert made.prepare_capture(decode()) is not None


def test_plans_of_windows_beside_plans_on_the_host(on_host):
    """Layers with a window, whose blocks are their own, are planned apart from the others."""
    common = decode()
    common = common.replace(
        window_block_table_tensor=common.block_table_tensor, window_slot_mapping=common.slot_mapping
    )
    on_device = fake("DEVICE", Level.ALWAYS, InGraph)
    host = fake("HOST", Level.UNIFORM_SINGLE_TOKEN_DECODE, on_host)
    backend = grouped_backend({SLIDING: on_device}, default=host)
    made = backend.builder(backend, [FULL, SLIDING], 16, "cpu")
    with pytest.raises(ValueError, match="group DEVICE must plan nothing in a captured graph"):
        made.prepare_capture(common)


def test_a_group_too_weak_for_a_capture_refuses_to_be_in_it(make_batch, three):
    batch = mixed_batch(make_batch)
    builder = three.builder(three, list(LAYERS), 16, "cpu")
    common = dataclasses.replace(batch.common, seq_lens_cpu=None, num_computed_tokens_cpu=None)
    meta = builder.build_for_cudagraph_capture(common)
    check(attention(batch.q, batch.kv_cache, meta, SCALE), None, batch, {})
    for spec, name in ((SLIDING, "FLEX"), (CAPPED, "TORCH")):
        assert runs_on(meta, spec).name == name
        assert runs_on(meta, spec).support.cudagraph is Level.NEVER
        with pytest.raises(ValueError, match=f"group {name} must attend between captured graphs"):
            attention(batch.q, batch.kv_cache, meta, SCALE, **LAYERS[spec])
    backend = grouped_backend({CHUNKED: "FLEX"}, default="TRITON")
    meta = backend.builder(backend, [FULL, CHUNKED], 16, "cpu").build_for_cudagraph_capture(common)
    with pytest.raises(ValueError, match="group FLEX must attend between captured graphs"):
        attention(batch.q, batch.kv_cache, meta, SCALE, attention_chunk_size=32)


@pytest.mark.parametrize(
    ("level", "lengths", "captured"),
    [
        (Level.ALWAYS, [1, 5], True),
        (Level.UNIFORM_BATCH, [3, 3], True),
        (Level.UNIFORM_BATCH, [3, 2], False),
        (Level.UNIFORM_SINGLE_TOKEN_DECODE, [1, 1], True),
        (Level.UNIFORM_SINGLE_TOKEN_DECODE, [3, 3], False),
        (Level.NEVER, [1, 1], False),
    ],
)
def test_levels_and_batches(level, lengths, captured):
    backend = grouped_backend({SLIDING: fake("LEVELLED", level)}, default="TRITON")
    builder = backend.builder(backend, list(LAYERS), 16, "cpu")
    common = CommonAttentionMetadata.from_lengths(lengths, [9, 9], [[1], [2]], 16)
    part = builder.build_for_cudagraph_capture(common).plans[SLIDING]
    assert (part.backend is not builder.backend.parts[0]) is not captured
    assert backend.support.cudagraph is level
    assert backend.builder.cudagraph_support is level


def test_levels_by_group(three):
    assert levels(three, list(LAYERS)) == {
        "FLEX": Level.NEVER, "TORCH": Level.NEVER, "TRITON": Level.ALWAYS,
    }  # fmt: skip
    assert levels(three, [FULL]) == {"TRITON": Level.ALWAYS}
    assert levels(get_backend("TRITON"), [FULL]) == {"TRITON": Level.ALWAYS}
    assert three.support.cudagraph is Level.NEVER


def test_auto_in_a_group_says_who_runs(monkeypatch, make_batch):
    parts = tuple(fake(n, Level.ALWAYS) for n in ("TRITON", "FLASH_ATTN"))
    monkeypatch.setattr(auto, "TRITON", parts[0])
    monkeypatch.setattr(auto, "FLASH_ATTN", parts[1])
    whole = dataclasses.replace(auto.BACKEND, support=parts[0].support, parts=parts)
    spec = dataclasses.replace(FULL, dtype=torch.bfloat16)
    grouped = grouped_backend({is_sliding: "FLEX"}, default=whole)
    assert levels(grouped, [spec]) == {"AUTO": Level.ALWAYS}
    for backend in (whole, grouped):
        for name, runner in (("decode", "TRITON"), ("prefill", "FLASH_ATTN")):
            batch = mixed_batch(make_batch, name, dtype=torch.bfloat16)
            meta = built(backend, batch.common, (spec,))
            assert runs_on(meta, spec).name == runner


def test_drafting_is_the_groups_own(make_batch, three):
    batch = mixed_batch(make_batch)
    builder = three.builder(three, list(LAYERS), 16, "cpu")
    meta = builder.build_for_drafting(batch.common, 0)
    for options in LAYERS.values():
        check(attention(batch.q, batch.kv_cache, meta, SCALE, **options), None, batch, options)


def test_orders_of_a_batch_must_agree():
    first, second = (type("B", (OnHost,), {"reorder_batch_threshold": n}) for n in (1, 2))
    groups = {SLIDING: fake("A", Level.NEVER, first), CAPPED: fake("B", Level.NEVER, second)}
    backend = grouped_backend(groups, default="TRITON")
    with pytest.raises(ValueError, match="must want one order of a batch"):
        backend.builder(backend, list(LAYERS), 16, "cpu")
    assert backend.builder(backend, [CAPPED, FULL], 16, "cpu").reorder_batch_threshold == 2
