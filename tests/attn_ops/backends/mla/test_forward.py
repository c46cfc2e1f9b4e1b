"""The forward of latent backends: both ways, in any order of a batch, through a small workspace.

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent.
"""

import dataclasses

import pytest
import torch

from attn_ops import (
    advance_step,
    get_backend,
    grouped_backend,
    mla_attention,
    mla_attention_with_lse,
)
from attn_ops.backends.mla import auto_mla
from attn_ops.backends.mla import builder as building
from attn_ops.backends.mla import plan as planning
from attn_ops.backends.mla.builder import MLAMetadataBuilder
from attn_ops.backends.mla.torch_mla import BACKEND, reference_mla_attention
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.metadata import AttentionSpec, LatentShape
from tests.kit.latent import SMALL, LatentBatch, build_latent_batch

SPEC = AttentionSpec.of_latent(3, SMALL, torch.float64)
BATCHES = {
    "mixed": ([1, 1, 0, 12, 40], [5, 33, 0, 12, 61]),
    "unsorted": ([30, 1, 0, 12, 1, 20], [61, 33, 0, 12, 9, 90]),
}


@pytest.fixture(autouse=True)
def way_by_query_length(monkeypatch):
    """Queries of more than 8 tokens take the prefill way, whatever is measured."""
    monkeypatch.setattr(planning, "SHORT_QUERY_LEN", 8)
    monkeypatch.setattr(planning, "LONG_CONTEXT_QUERY_LEN", 0)


def batch(name: str, num_tokens: int = 1024) -> LatentBatch:
    """One of BATCHES, prefills through a workspace of `num_tokens`."""
    workspace = MLAWorkspace([SPEC], num_tokens)
    more = {"num_padding_rows": 2, "dtype": torch.float64, "workspace": workspace}
    return build_latent_batch(*BATCHES[name], **more)


def check(b: LatentBatch) -> None:
    want_lse = torch.empty(b.q.shape[:2])
    want = reference_mla_attention(b.q, b.kv_cache, b.common, b.options(lse=want_lse))
    out, lse = mla_attention_with_lse(*b.arguments, **b.keywords)
    assert torch.equal(mla_attention(*b.arguments, **b.keywords), out)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-5)
    assert (out[b.common.num_actual_tokens :] == 0).all()


def test_both_ways_give_the_same(monkeypatch):
    outs = []
    for decodes in (True, False):
        monkeypatch.setattr(building, "takes_decode_way", lambda q, s, d=decodes: d or s == 0)
        b = batch("unsorted", 40)
        plan = b.meta.planned(SPEC)
        assert (plan.prefill is None) == decodes
        assert (plan.decode is None) != decodes or plan.decode_metadata.max_query_len == 0
        outs.append(mla_attention(*b.arguments, **b.keywords))
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)


def test_views_are_the_requests_of_each_way():
    b = batch("unsorted")
    plan = b.meta.planned(SPEC)
    decode, prefill = plan.decode_metadata, plan.prefill_metadata
    assert decode.seq_lens.tolist() == [33, 0, 9]
    assert decode.query_start_loc.tolist() == [0, 1, 1, 2]
    assert prefill.seq_lens.tolist() == [61, 12, 90]
    assert prefill.query_start_loc.tolist() == [0, 30, 42, 62]
    assert (prefill.max_query_len, prefill.max_seq_len) == (30, 90)
    for view in (decode, prefill):
        view.validate(block_size=4)
    rows = torch.cat([decode.slot_mapping, prefill.slot_mapping]).sort().values
    assert torch.equal(rows, b.common.slot_mapping[:64].sort().values)


def test_a_sorted_batch_is_sliced():
    plan = batch("mixed").meta.planned(SPEC)
    assert (plan.decode.rows, plan.prefill.rows) == (slice(0, 2), slice(2, 54))
    storage = plan.decode_metadata.seq_lens.untyped_storage().data_ptr()
    assert storage == plan.batch.seq_lens.untyped_storage().data_ptr()


def test_without_mirrors_all_take_the_decode_way():
    b = batch("mixed")
    unknown = dict.fromkeys(("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu"))
    builder = BACKEND.builder(BACKEND, [SPEC], 4, "cpu")
    b.meta = builder.build(0, b.common.replace(**unknown))
    plan = b.meta.planned(SPEC)
    assert plan.prefill is None
    assert plan.decode_metadata is b.meta.common
    check(b)


def test_captured_steps_take_the_decode_way():
    b = build_latent_batch([64, 64], [64, 80], dtype=torch.float64)
    builder = BACKEND.builder(BACKEND, [SPEC], 4, "cpu")
    assert builder.build(0, b.common).planned(SPEC).prefill is not None
    b.meta = builder.build_for_cudagraph_capture(b.common)
    plan = b.meta.planned(SPEC)
    assert plan.prefill is None
    assert plan.decode_metadata.seq_lens is b.common.seq_lens, "a replay's lengths are seen"


def test_advance_step_moves_what_a_captured_step_reads():
    b = build_latent_batch([1, 1, 1], [5, 9, 1], block_size=16, dtype=torch.float64)
    room = torch.randn(b.kv_cache.shape, dtype=torch.float64)
    cache = torch.where(b.kv_cache.isnan(), room, b.kv_cache)
    builder = BACKEND.builder(BACKEND, [SPEC], 16, "cpu")
    unknown = dict.fromkeys(("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu"))
    b.meta = builder.build_for_cudagraph_capture(b.common.replace(**unknown, max_seq_len=16))
    b.kv_cache, c = cache, b.common
    for steps in range(1, 4):
        tokens = torch.zeros(3, dtype=torch.int64)
        advance_step(
            tokens, tokens.clone(), c.positions, c.seq_lens, c.slot_mapping,
            c.block_table_tensor, 16,
        )  # fmt: skip
        assert c.seq_lens.tolist() == [5 + steps, 9 + steps, 1 + steps]
        check(b)


def test_one_workspace_for_all_builders():
    workspace = MLAWorkspace([SPEC], 64)
    builder = MLAMetadataBuilder(BACKEND, [SPEC], 4, "cpu", workspace=workspace)
    assert builder.workspace is workspace
    own = MLAMetadataBuilder(BACKEND, [SPEC], 4, "cpu")
    assert own.workspace is own.workspace
    assert own.workspace.num_tokens == 64 * 1024


def test_workspaces_that_do_not_fit_are_refused():
    """When they are given, and not in the middle of a step."""
    shape = LatentShape(16, 8, 8, 8)
    specs = [AttentionSpec.of_latent(2, shape, torch.float32)]
    wide = AttentionSpec.of_latent(2, shape, torch.bfloat16)
    narrow = AttentionSpec.of_latent(2, LatentShape(8, 8, 8, 8), torch.float32)
    for spec, tokens, message in (
        (specs[0], 8, "workspace must hold at least a page of 16 tokens, got 8"),
        (narrow, 64, "workspace must be at least 24 wide and of torch.float32, got 16"),
        (wide, 64, r"workspace must be .* of torch.float32, got 24 and torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            BACKEND.builder(BACKEND, specs, 16, "cpu", workspace=MLAWorkspace([spec], tokens))
    with pytest.raises(
        ValueError, match=r"specs must have one dtype, got torch.bfloat16, torch.fl"
    ):
        MLAWorkspace([specs[0], wide])


def test_parts_of_auto_mla_share_a_workspace(monkeypatch):
    parts = [dataclasses.replace(BACKEND, name=p.name) for p in auto_mla.PARTS]
    for part in parts:
        monkeypatch.setattr(auto_mla, part.name, part)
    backend = dataclasses.replace(auto_mla.BACKEND, support=BACKEND.support, parts=tuple(parts))
    own = backend.builder(backend, [SPEC], 16, "cpu")
    assert {id(part.workspace) for part in own._builders.values()} == {id(own.workspace)}
    assert own.profile_run(50) == own.workspace.reserve(50) > 0


def test_groups_of_layers_reserve_what_each_takes():
    """Layers without latent attention need nothing; nor do their builders alone."""
    standard = AttentionSpec(4, 2, 8, torch.float32)
    both = grouped_backend({lambda spec: spec.latent is None: "TORCH"}, default="TORCH_MLA")
    alone = BACKEND.builder(BACKEND, [SPEC], 16, "cpu").profile_run(50)
    assert both.builder(both, [standard, SPEC], 16, "cpu").profile_run(50) == alone > 0
    torch_backend = get_backend("TORCH")
    assert torch_backend.builder(torch_backend, [standard], 16, "cpu").profile_run(50) == 0
