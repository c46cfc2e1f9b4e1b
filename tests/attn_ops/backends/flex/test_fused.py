"""The fused path, traced for a CPU: how often it is compiled, its options, its tiles."""

import functools
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from attn_ops import AttentionSpec, attention, attention_with_lse, varlen_attention, varlen_metadata
from attn_ops.backends.flex import BACKEND, attend, flex_backend, plan
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.block_layout import BlocksparseParams, BlockTables, local_strided
from tests.attn_ops.backends.flex.masks import RAGGED, check, every_third, ragged

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


@pytest.mark.slow
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
    meta = meta.replace(backend=BACKEND, plans={})
    torch.testing.assert_close(varlen_attention(q, k, v, meta, 0.3), want)


def test_fused_block_sparse_layers(make_batch, fused, num_graphs):
    """Tiles and masks by head; one graph for short queries and one for long ones."""
    tables = BlockTables(local_strided(BlocksparseParams(400, 4, 2, 16, 1, 5)))
    before = num_graphs()
    for lengths in (([1, 1], [300, 2]), ([200, 3], [210, 70]), ([1], [40]), ([40, 0], [90, 5])):
        batch = make_batch(*lengths, backend=BACKEND)
        out = attention(batch.q, batch.kv_cache, batch.meta, 0.3, blocksparse=tables)
        want = reference_attention(batch.q, batch.kv_cache, batch.common, 0.3, blocksparse=tables)
        assert (out - want).norm() <= 1e-5 * want.norm()
    assert num_graphs() - before == 2


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


def test_tiles_of_a_layout_are_not_neighbours():
    """The kernel would visit those behind the first one, whichever the mask lists."""
    fields = (8, 64, 64, torch.bfloat16, (), 16, None, (False,) * 6, attend.Mods())
    assert attend._Variant(*fields).kernel_options().get("BLOCKS_ARE_CONTIGUOUS") is True
    assert attend._Variant(*fields, 64).kernel_options().get("BLOCKS_ARE_CONTIGUOUS") is False
