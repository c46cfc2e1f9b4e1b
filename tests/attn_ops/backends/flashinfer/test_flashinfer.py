"""FLASHINFER's own part on a CPU: who goes to which wrapper, page arrays, padding, who owns a plan.

FlashInfer is replaced by `fake.py`. tests/gpu/attn_ops/test_flashinfer.py runs kernels.
"""

import dataclasses
import gc

import numpy as np
import pytest
import torch

from attn_ops import AttentionSpec, attention
from attn_ops.backends import flashinfer as backend_module
from attn_ops.backends.flashinfer.parts import divide
from attn_ops.backends.flashinfer.wrappers import split_bytes
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.metadata import KV_CACHE_DTYPES
from tests.attn_ops.backends.flashinfer.fake import (
    BLOCK,
    Event,
    Paged,
    builder_of,
    check,
    install,
    make,
)


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    install(monkeypatch)


SPEC = AttentionSpec(8, 2, 64, torch.float32)
BATCHES = {
    "decodes": ([1, 1, 1], [1, 17, 40], [("decode", 3)]),
    "mixed": ([1, 1, 5, 40], [5, 33, 5, 64], [("decode", 2), ("prefill", 2)]),
    "prefills": ([2, 20], [2, 50], [("prefill", 2)]),
    "a decode behind": ([1, 5, 1], [9, 5, 30], [("decode", 1), ("prefill", 2)]),
    "a prefill in front": ([5, 1, 1], [9, 5, 30], [("prefill", 3)]),
    "no query, no tokens": ([1, 0, 1, 7], [5, 0, 20, 7], [("decode", 2), ("prefill", 1)]),
    "no query among decodes": ([1, 0, 1], [5, 18, 20], [("decode", 1), ("prefill", 2)]),
    "padding requests behind": ([1, 1, 1, 1], [5, 33, 0, 0], [("decode", 2)]),
    "padding request between": ([1, 1, 1, 3], [5, 0, 33, 4], [("decode", 2), ("prefill", 1)]),
    "padding prefill in front": ([3, 1, 4], [0, 9, 20], [("prefill", 2)]),
    "padding alone": ([1, 1], [0, 0], []),
    "no query at all": ([0, 0], [5, 20], []),
    "nobody": ([], [], []),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 7, "soft_cap": 5.0}])
def test_against_the_oracle(batch, options):
    query, seq, planned = BATCHES[batch]
    spec = dataclasses.replace(SPEC, **options)
    q, cache, meta = make(query, seq, spec, pad=3)
    assert Paged.planned == planned
    check(q, cache, meta, **options)


def test_layers_of_one_geometry_may_differ_in_scale():
    q, cache, meta = make([1, 6], [20, 30], SPEC)
    for scale in (1.0, 0.01):
        check(q, cache, meta, scale)


@pytest.mark.parametrize(("query", "own_output"), [([1, 1], False), ([2, 6], True)])
def test_a_batch_for_one_wrapper_is_one_call(monkeypatch, query, own_output):
    """Of the library, with q and the cache as they are: views cost as much host time as its run."""
    q, cache, meta = make(query, [20, 30], SPEC)
    calls, run = [], Paged.run

    def spy(self, q, kv_cache, **keywords):
        calls.append((q, kv_cache, keywords.pop("out") is not None, keywords))
        return run(self, q, kv_cache, **keywords)

    monkeypatch.setattr(Paged, "run", spy)
    out = attention(q, cache, meta, 0.3)
    ((asked, stored, has_output, keywords),) = calls
    assert asked.data_ptr() == q.data_ptr()
    assert stored.data_ptr() == cache.data_ptr()
    assert has_output == own_output, "a prefill wrapper would clear one of its own"
    assert keywords == {"q_scale": 0.3}
    want = reference_attention(q, cache, meta.common, 0.3)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_layers_of_several_geometries_keep_their_plans():
    """A plan is found anew by shapes and options only, the second time."""
    specs = [dataclasses.replace(SPEC, soft_cap=cap) for cap in (None, 5.0, 1.0)]
    q, cache, meta = make([1, 1], [20, 30], SPEC, builder=builder_of(*specs))
    for _ in range(2):
        for spec in specs:
            check(q, cache, meta, soft_cap=spec.soft_cap)
    with pytest.raises(ValueError, match="layer must have been planned by the builder"):
        attention(q, cache, meta, 0.3, soft_cap=2.0)


@pytest.mark.parametrize("heads", [(8, 8), (6, 2), (8, 2)])
def test_groups_of_any_size_decode_on_tensor_cores(heads):
    make([1], [20], AttentionSpec(*heads, 64, torch.float32))
    assert Paged.planned == [("decode", 1)]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [{}, {"k_scale": 0.3, "v_scale": 1.7}, {"v_scale": 2.0}])
def test_fp8_caches(dtype, scales):
    """Scales stay on the device: one goes into q, one into the output."""
    spec = dataclasses.replace(SPEC, kv_cache_dtype=dtype)
    q, cache, meta = make([1, 6], [20, 30], spec, pad=2)
    assert Paged.planned == [("decode", 1), ("fa2", 1)]
    cache = cache.to(KV_CACHE_DTYPES[dtype]).view(torch.uint8)
    options = {name: torch.tensor([scale]) for name, scale in scales.items()}
    options["kv_cache_dtype"] = dtype
    check(q, cache, meta, **options)


@pytest.mark.parametrize("causal", [True, False])
def test_plans_are_as_causal_as_the_batch(causal):
    """Whatever the spec says that the builder was given: cross-attention, a shared prefix."""
    q, cache, meta = make([1, 6], [20, 30], SPEC)
    builder = builder_of(dataclasses.replace(SPEC, causal=causal))
    check(q, cache, builder.build(0, meta.common.replace(causal=False)))


def test_a_cache_with_heads_before_tokens():
    q, cache, meta = make([1, 6], [20, 30], SPEC)
    other = cache.transpose(2, 3).contiguous().transpose(2, 3)
    assert other.stride(3) > other.stride(2)
    assert torch.equal(attention(q, other, meta, 0.3), attention(q, cache, meta, 0.3))


@pytest.mark.parametrize("offset", [0, 1])
def test_rows_that_kernels_cannot_load_are_copied(monkeypatch, offset):
    """A slice of a merged product is loaded where it stands, unless pieces of 16 bytes straddle."""
    q, cache, meta = make([1, 6], [20, 30], SPEC)
    merged = torch.randn(7, 8 * 64 + 64 + offset)
    q = merged[:, offset : offset + 512].view(7, 8, 64)
    seen = []
    run = Paged.run

    def spy(self, q, *arguments, **keywords):
        seen.append(q.data_ptr() - merged.data_ptr())
        assert all(stride % 4 == 0 for stride in q.stride()[:2])
        run(self, q, *arguments, **keywords)

    monkeypatch.setattr(Paged, "run", spy)
    out = attention(q, cache, meta, 0.3)
    inside = [0 <= distance < merged.nbytes for distance in seen]
    assert inside == [offset == 0] * 2
    want = reference_attention(q, cache, meta.common, 0.3)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_batches_built_before_either_runs_do_not_share_a_plan():
    builder = builder_of(SPEC)
    made = [make([1, 1, 4], lens, SPEC, builder=builder) for lens in ([5, 33, 9], [40, 2, 20])]
    for q, cache, meta in made:
        check(q, cache, meta)
    assert len(Paged.made) == 4


def test_wrappers_are_planned_again_when_their_metadata_is_gone():
    builder = builder_of(SPEC)
    for _ in range(5):
        make([1, 4], [5, 9], SPEC, builder=builder)
        gc.collect()
    assert len(Paged.made) == 2
    assert len(Paged.planned) == 10


def test_a_wrapper_is_not_planned_while_its_last_plan_is_copied(monkeypatch):
    """FlashInfer would overwrite the pinned arrays that the device has yet to read."""
    builder = builder_of(SPEC)
    monkeypatch.setattr(Event, "done", False)
    for _ in range(2):
        make([1], [5], SPEC, builder=builder)
        gc.collect()
    assert len(Paged.made) == 2
    monkeypatch.setattr(Event, "done", True)
    make([1], [5], SPEC, builder=builder)
    assert len(Paged.made) == 2


def test_host_arrays_are_no_views_of_the_mirrors():
    """A session rewrites its pinned mirrors for the next step while copies are under way."""
    _, _, meta = make([1, 6], [20, 30], SPEC)
    division = divide(meta.common, BLOCK)
    arrays = [
        getattr(part, field)
        for part in (division.decodes, division.prefills)
        for field in ("query_start_loc", "page_start_loc", "last_page_len", "seq_lens")
    ]
    before = [array.clone() for array in arrays]
    meta.common.seq_lens_cpu.fill_(99)
    meta.common.query_start_loc_cpu.fill_(99)
    assert all(map(torch.equal, before, arrays))


@pytest.mark.parametrize("number", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_random_batches(number):
    """Rows and pages of every request land in exactly one part."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        size = int(rng.integers(0, 12))
        query = rng.choice([0, 1, 1, 1, 2, 30], size)
        seq = np.where(rng.random(size) < 0.2, 0, query + rng.integers(0, 50, size))
        _, _, meta = make(query.tolist(), seq.tolist(), SPEC)
        division = divide(meta.common, BLOCK)
        live = seq > 0
        assert division.num_rows == query[live].sum()
        rows = np.flatnonzero(np.repeat(live, query))
        if division.row_indices is None:
            assert rows.tolist() == list(range(len(rows)))
        else:
            assert division.row_indices.tolist() == rows.tolist()
        parts = [part for part in (division.decodes, division.prefills) if part is not None]
        assert sum(part.rows.stop - part.rows.start for part in parts) == division.num_rows
        assert division.num_pages == (-(-seq // BLOCK)).sum()
        if division.decodes is not None:
            assert (division.decodes.query_start_loc.diff() == 1).all()


@pytest.mark.parametrize("name", ["query_start_loc_cpu", "seq_lens_cpu"])
def test_missing_mirrors_are_refused(name):
    _, _, meta = make([1, 6], [20, 30], SPEC)
    common = meta.common.replace(**{name: None})
    with pytest.raises(ValueError, match=f"{name} must be given, got None"):
        builder_of(SPEC).build(0, common)


def test_workspace_holds_what_splitting_can_need():
    """FlashInfer's own bound: tiles that fit 2 a multiprocessor, each with the heads of a group."""
    spec = AttentionSpec(64, 8, 128, torch.bfloat16)
    tiles = 2 * 132 // 8
    assert split_bytes(spec, 132) >= 64 * tiles * 128 * 128 * 4 + 64 * tiles * 128 * 4
    assert split_bytes(spec, 132) > 128 << 20, "the recommended size is too small for this one"


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (None, "flashinfer-python must be installed, got none"),
        ("0.6.7", "flashinfer-python must be 0.6.8 or later, got 0.6.7"),
        ("0.5.9", "flashinfer-python must be 0.6.8 or later, got 0.5.9"),
        ("0.6.8.post1", None),
        ("0.10.0rc1", None),
        ("1.0", None),
    ],
)
def test_unavailable_says_what_is_missing(reason_against, installed, reason):
    assert reason_against(backend_module, installed, installed) == reason
