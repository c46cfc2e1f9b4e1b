"""FLEX on a CPU: custom masks, tiles, and the fused path as far as it goes without a GPU.

What FLEX declares is tested by tests/conformance; its kernels by tests/gpu/attn_ops/test_flex.py.

T rows, N query heads, Q rows of one request, C cached tokens of one request.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from attn_ops import (
    AttentionSpec,
    attention,
    attention_with_lse,
    register_backend,
    select_backend,
    varlen_attention,
    varlen_metadata,
)
from attn_ops.backends import registry
from attn_ops.backends.flex import BACKEND, attend, flex_backend, plan
from attn_ops.backends.torch_backend import reference_attention

RAGGED = ([1, 3, 0, 7, 40, 2], [5, 33, 4, 7, 61, 2])
PREFIX = torch.tensor([2, 9, 1, 5, 30, 0], dtype=torch.int32)


def ragged(make_batch, backend=BACKEND, **options):
    """RAGGED, its last request made one of padding: it has rows and no keys."""
    batch = make_batch(*RAGGED, backend=backend, num_padding_rows=3, **options)
    for lengths in (batch.common.seq_lens, batch.common.seq_lens_cpu):
        lengths[-1] = 0
    batch.q[sum(RAGGED[0]) - 2 :] = float("nan")
    batch.meta.plans.clear()  # made for the lengths before
    return batch


def prefix_lm(request, query_position, key_position):
    return (key_position < PREFIX[request]) | (key_position <= query_position)


def every_third(request, query_position, key_position):
    """Rows at positions that 5 divides see nothing."""
    return ((query_position - key_position) % 3 == 0) & (query_position % 5 != 0)


def nearer_is_better(score, head, request, query_position, key_position):
    return score - (head + 1) * 0.1 * (query_position - key_position).abs() + request


def oracle(batch, options, causal, mask, score=None):
    """Dense, in float64: out [T, N, H] and log-sum-exp [T, N]."""
    c, scale = batch.common, 0.3
    out, lse = batch.q.new_zeros(batch.q.shape).double(), torch.zeros(batch.q.shape[:2]).double()
    lse.fill_(float("-inf"))
    starts = c.query_start_loc.tolist()
    for request, length in enumerate(c.seq_lens.tolist()):
        begin, end = starts[request : request + 2]
        if begin == end or length == 0:
            continue
        table, size = c.block_table_tensor[request].long(), batch.kv_cache.shape[2]
        keys = torch.arange(length)
        k, v = batch.kv_cache[table[keys // size], :, keys % size].double().unbind(1)
        group = batch.q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        rows = torch.arange(length - (end - begin), length)
        s = torch.einsum("qnh,cnh->nqc", batch.q[begin:end].double(), k) * scale
        places = torch.meshgrid(torch.arange(s.shape[0]), rows, keys, indexing="ij")
        request_NQC = torch.full_like(places[0], request)
        if score is not None:
            s = score(s, places[0], request_NQC, *places[1:])
        seen = mask(request_NQC, *places[1:])
        if causal:
            seen &= places[2] <= places[1]
        s = s.masked_fill(~seen, float("-inf"))
        if "sinks" in options:
            sink = options["sinks"].double()[:, None, None].expand(*s.shape[:2], 1)
            s = torch.cat([s, sink], -1)
        weights = s.softmax(-1).nan_to_num(0)[..., :length]
        out[begin:end] = torch.einsum("nqc,cnh->qnh", weights, v)
        lse[begin:end] = s.logsumexp(-1).T
    return out, lse


def check(out, lse, want, want_lse):
    assert out.isfinite().all()
    assert (out - want).norm() <= 1e-5 * want.norm()
    assert (out[want.abs().amax((1, 2)) == 0] == 0).all()
    assert torch.equal(lse.isinf(), want_lse.isinf())
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


# -- custom masks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [prefix_lm, every_third])
@pytest.mark.parametrize("sinks", [False, True])
def test_custom_mask(make_batch, mask, causal, sinks, compiled):
    backend = flex_backend("CUSTOM", mask)
    batch = ragged(make_batch, backend, causal=causal)
    options: dict[str, Any] = {"sinks": torch.tensor([-1.0, 0.0, 0.5, 2.0])} if sinks else {}
    attend_ = attention_with_lse
    if compiled:
        attend_ = torch.compile(attend_, backend="aot_eager", fullgraph=True, dynamic=True)
    out, lse = attend_(batch.q, batch.kv_cache, batch.meta, 0.3, **options)
    check(out, lse, *oracle(batch, options, causal, mask))


def test_custom_score(make_batch):
    backend = flex_backend("CUSTOM", prefix_lm, nearer_is_better)
    batch = ragged(make_batch, backend, causal=False)
    out, lse = attention_with_lse(batch.q, batch.kv_cache, batch.meta, 0.3)
    check(out, lse, *oracle(batch, {}, False, prefix_lm, nearer_is_better))


def test_custom_mask_without_a_cache(monkeypatch):
    """Registered, selected by name, updated between steps."""
    monkeypatch.setattr(registry, "_registered", {})
    limit = torch.zeros(3, dtype=torch.int32)
    register_backend(flex_backend("FIRST_KEYS", lambda r, q, k: k < limit[r]))
    spec = AttentionSpec(4, 2, 8, torch.float32, causal=False)
    assert select_backend(spec, block_size=16, device="cpu", backend="FIRST_KEYS")
    meta = varlen_metadata([3, 0, 20], spec, backend="FIRST_KEYS", num_padded_tokens=25)
    q, k, v = (torch.randn(25, n, 8) for n in (4, 2, 2))
    for x in (q, k, v):
        x[23:] = float("nan")
    for first, last in ((1, 20), (3, 4)):
        limit.copy_(torch.tensor([first, 0, last]))
        out = varlen_attention(q, k, v, meta, 0.3)
        for begin, end, seen in ((0, 3, first), (3, 23, last)):
            k_, v_ = (x[begin : begin + seen].repeat_interleave(2, 1) for x in (k, v))
            s = torch.einsum("qnh,cnh->nqc", q[begin:end], k_) * 0.3
            torch.testing.assert_close(
                out[begin:end], torch.einsum("nqc,cnh->qnh", s.softmax(-1), v_)
            )
        assert (out[23:] == 0).all()


def test_custom_masks_are_refused_where_positions_are_others():
    backend = flex_backend("CUSTOM", prefix_lm)
    spec = AttentionSpec(4, 2, 8, torch.float32)
    chunked = dataclasses.replace(spec, attention_chunk_size=32)
    with pytest.raises(ValueError, match=r"attention_chunk_size must be None with .*supported"):
        backend.builder(backend, [chunked], 16, "cpu")
    common = varlen_metadata([40, 50], spec).common
    with pytest.raises(ValueError, match=r"common_prefix_len must be 0 with .*supported"):
        backend.builder(backend, [spec], 16, "cpu").build(16, common)
    with pytest.raises(ValueError, match="mask must be callable, got NoneType"):
        flex_backend("CUSTOM", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="score must be callable, got int"):
        flex_backend("CUSTOM", prefix_lm, 3)  # pyright: ignore[reportArgumentType]


def test_a_mask_of_ones_own_is_only_taken_by_name(monkeypatch):
    """Unnamed even where no other backend applies: it computes something else."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    register_backend(flex_backend("CUSTOM", prefix_lm))
    spec = AttentionSpec(4, 2, 8, torch.float32)
    for measure in (False, True):
        with pytest.raises(ValueError, match="CUSTOM: its mask is its own; ask for it by name"):
            select_backend(spec, block_size=16, device="cpu", measure=measure)
    assert select_backend(spec, block_size=16, device="cpu", backend="CUSTOM")
    chunked = dataclasses.replace(spec, attention_chunk_size=32)
    with pytest.raises(ValueError, match="attention_chunk_size must be None with a custom mask"):
        select_backend(chunked, block_size=16, device="cpu", backend="CUSTOM")


# -- plans -----------------------------------------------------------------------------------------


def test_geometries_share_the_plan_of_their_mask(make_batch, monkeypatch):
    """The builder's: a layer makes none."""
    made, real = [], plan.make_plan
    batch = make_batch(*RAGGED, backend=BACKEND)
    monkeypatch.setattr(plan, "make_plan", lambda *mask: made.append(mask[1:]) or real(*mask))
    specs = [
        AttentionSpec(4, 2, 8, torch.float32, soft_cap=cap, sliding_window=window)
        for cap in (None, 2.0)
        for window in (None, 3)
    ]
    meta = BACKEND.builder(BACKEND, specs, 4, "cpu").build(0, batch.common)
    for cap in (None, 2.0, 5.0):
        for window in (None, 3):
            options = {"soft_cap": cap, "sliding_window": window}
            out = attention(batch.q, batch.kv_cache, meta, 0.3, **options)
            want = reference_attention(batch.q, batch.kv_cache, batch.common, 0.3, **options)
            assert (out - want).norm() <= 1e-5 * want.norm()
    assert made == [(True, None), (True, 3)]


def test_a_batch_without_the_mirror_is_refused(make_batch):
    """Instead of waiting for the device."""
    batch = make_batch(*RAGGED, backend=BACKEND)
    common = batch.common.replace(seq_lens_cpu=None)
    builder = BACKEND.builder(BACKEND, [AttentionSpec(4, 2, 8, torch.float32)], 4, "cpu")
    with pytest.raises(ValueError, match="seq_lens_cpu must be given, got None; FLEX"):
        builder.build(0, common)


@pytest.mark.parametrize("window", [15, 16, 20, 2**31 - 1, 2**40])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_wider_than_the_batch(make_batch, window, causal):
    """More rows than keys, as in cross-attention: positions start at -12, and see key 3 at 15."""
    batch = make_batch([16], [16], backend=BACKEND)
    keys = torch.tensor([4], dtype=torch.int32)
    common = batch.common.replace(
        seq_lens=keys, seq_lens_cpu=keys, num_computed_tokens_cpu=None, max_seq_len=4
    )
    made = plan.make_plan(common, causal, window)
    assert made is not None
    for row, position in enumerate(range(-12, 4)):
        first = max(0, position - window + 1)
        end = min(4, position + 1 if causal else position + window)
        seen = range(int(made.first_key_T[row]), int(made.end_key_T[row]))
        assert list(seen) == list(range(first, end))


@pytest.mark.parametrize("sink", [float("-inf"), float("inf")])
def test_infinite_sinks(make_batch, sink):
    """-inf is no sink, inf takes all; rows without keys are zero, a padding request's included."""
    sinks = torch.full((4,), sink)
    for backend, mask in ((BACKEND, None), (flex_backend("CUSTOM", every_third), every_third)):
        batch = ragged(make_batch, backend)
        out, lse = attention_with_lse(batch.q, batch.kv_cache, batch.meta, 0.3, sinks=sinks)
        if sink > 0:
            assert not out.any()
        else:
            check(out, lse, *oracle(batch, {}, True, mask or (lambda r, q, k: k >= 0)))


# -- inside the dispatcher -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_grad_modes(make_batch, mode, requires_grad):
    with mode():
        batch = ragged(make_batch)
        if requires_grad and mode is not torch.inference_mode:
            batch.q.requires_grad_()
        out = attention(batch.q, batch.kv_cache, batch.meta, 0.3)
        want = reference_attention(batch.q, batch.kv_cache, batch.common, 0.3)
        assert (out - want).norm() <= 1e-5 * want.norm()


def test_opcheck(make_batch):
    """Its dispatch mode hides functorch's keys from the operator, as a graph's first run does."""
    for backend in (BACKEND, flex_backend("CUSTOM", prefix_lm)):
        batch = ragged(make_batch, backend)
        torch.library.opcheck(
            torch.ops.attn_ops.attention.default, (batch.q, batch.kv_cache, batch.meta, 0.3)
        )


# -- tiles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_tile", [16, 128])
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_hold_every_visible_key(row_tile, window, causal):
    query, seq = [1, 300, 0, 5, 17, 2], [5, 333, 40, 70, 17, 0]
    spec = AttentionSpec(1, 1, 8, torch.float32)
    common = varlen_metadata(query, spec).common.replace(
        seq_lens=torch.tensor(seq, dtype=torch.int32), num_computed_tokens_cpu=None
    )
    made = plan._plan(common, causal, window, True, 384, 512, row_tile)
    key = torch.arange(512)
    seen = (key >= made.first_key_T[:, None]) & (key < made.end_key_T[:, None])
    row = start = 0
    for num_rows, length in zip(query, seq, strict=True):
        for i in range(num_rows):
            position = length - num_rows + i
            first = 0 if window is None else max(0, position - window + 1)
            end = length if window is None or causal else min(length, position + window)
            end = min(end, position + 1) if causal else end
            want = (key >= start + first) & (key < start + end) if length else key < 0
            assert torch.equal(seen[row], want), (row, position)
            row += 1
        start += length
    assert not seen[row:].any()
    tiles = seen.view(-1, row_tile, 512 // plan.KEY_TILE, plan.KEY_TILE).any(3).any(1)
    counts, indices = made.num_tiles_11I[0, 0].tolist(), made.tiles_11IJ[0, 0].tolist()
    for needed, count, visited in zip(tiles, counts, indices, strict=True):
        needed = needed.nonzero().flatten().tolist()
        span = list(range(needed[0], needed[-1] + 1)) if needed else []
        assert visited[:count] == span


# -- the fused path, traced for a CPU --------------------------------------------------------------


MAKE = attend.compiled.__wrapped__


@pytest.fixture
def fused(monkeypatch):
    """Padding, variants and graphs as on CUDA; the graph runs unfused."""
    make = functools.partial(MAKE, backend="aot_eager")
    monkeypatch.setattr(plan, "runs_fused", lambda device: True)
    monkeypatch.setattr(attend, "compiled", functools.cache(make))
    counters.clear()


def random_batch(make_batch, generator, **options):
    pick = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    query = [pick(0, 40) for _ in range(pick(1, 5))]
    return make_batch(query, [n + pick(0, 90) for n in query], backend=BACKEND, **options)


@pytest.mark.parametrize("custom", [False, True])
def test_fused_graphs_do_not_depend_on_lengths(make_batch, fused, num_graphs, custom):
    """One for short queries, one for long ones; window, scale and cap are no part of them."""
    generator, before = torch.Generator().manual_seed(3), num_graphs()
    backend = flex_backend("CUSTOM", every_third) if custom else BACKEND
    batches = [([1], [1]), ([1, 1], [300, 2]), ([200], [200]), RAGGED]
    for i in range(12):
        batch = random_batch(make_batch, generator, num_padding_rows=i % 3)
        if i < len(batches):
            batch = make_batch(*batches[i], backend=BACKEND)
        batch.meta.backend = backend
        options = {"sliding_window": [None, 3, 60][i % 3], "soft_cap": 2.0 + i % 4}
        out = attention(batch.q, batch.kv_cache, batch.meta, 0.3 + i % 2, **options)
        if not custom:
            want = reference_attention(
                batch.q, batch.kv_cache, batch.common, 0.3 + i % 2, **options
            )
            assert (out - want).norm() <= 1e-5 * want.norm()
            assert (out[batch.common.num_actual_tokens :] == 0).all()
    assert num_graphs() - before == 2


def test_fused_options(make_batch, fused):
    """Heads narrower than 16 are padded; sinks, ALiBi and the log-sum-exp."""
    batch = ragged(make_batch)
    options: dict[str, Any] = {
        "sinks": torch.tensor([-1.0, 0.0, 0.5, 2.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
    }
    want_lse = torch.empty(batch.q.shape[:2])
    want = reference_attention(batch.q, batch.kv_cache, batch.common, 0.3, lse=want_lse, **options)
    out, lse = attention_with_lse(batch.q, batch.kv_cache, batch.meta, 0.3, **options)
    check(out, lse, want, want_lse.double())
    spec = AttentionSpec(4, 2, 8, torch.float32)
    meta = varlen_metadata([3, 0, 20], spec)
    q, k, v = torch.randn(23, 4, 8), torch.randn(23, 2, 8), torch.randn(23, 2, 5)
    want = varlen_attention(q, k, v, meta, 0.3)
    meta.backend, meta.plans = BACKEND, {}
    torch.testing.assert_close(varlen_attention(q, k, v, meta, 0.3), want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fused_inside_a_compiled_graph(make_batch, fused, num_graphs, mode):
    """Compiled in the first run of an outer graph, when the dispatcher is in another state."""
    outer = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    with mode():
        for lengths in (RAGGED, ([17, 1], [30, 80]), ([40], [70])):
            batch = make_batch(*lengths, backend=BACKEND)
            out = outer(batch.q, batch.kv_cache, batch.meta, 0.3)
            want = reference_attention(batch.q, batch.kv_cache, batch.common, 0.3)
            assert (out - want).norm() <= 1e-5 * want.norm()
    assert num_graphs() == 2, "the outer graph and the kernel's"


def test_fused_variants_have_recompilations_of_their_own(
    make_batch, fused, num_graphs, monkeypatch
):
    """More variants than Dynamo compiles of one code object."""
    make = functools.partial(MAKE, backend="eager")
    monkeypatch.setattr(attend, "compiled", functools.cache(make))
    for num_heads in range(1, 5):
        batch = make_batch([2, 1], [2, 9], num_heads=num_heads, num_kv_heads=1, backend=BACKEND)
        with torch._dynamo.config.patch(recompile_limit=2):
            out = attention(batch.q, batch.kv_cache, batch.meta, 0.3)
        want = reference_attention(batch.q, batch.kv_cache, batch.common, 0.3)
        assert (out - want).norm() <= 1e-5 * want.norm()
    assert num_graphs() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("row_tile", [16, 128])
def test_tiles_fit_into_shared_memory(dtype, head_size, row_tile):
    variant = attend._Variant(
        8, head_size, head_size, dtype, (), row_tile, None, (False,) * 6, attend.Mods()
    )
    options: dict[str, Any] = {**variant.kernel_options()}
    padded = 1 << (head_size - 1).bit_length()
    rows = options["BLOCK_M"] + 2 * options["num_stages"] * options["BLOCK_N"]
    assert rows * padded * dtype.itemsize <= 99 * 1024
    assert row_tile % options["BLOCK_M"] == 0
    assert plan.KEY_TILE % options["BLOCK_N"] == 0
