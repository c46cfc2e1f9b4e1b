"""Block-sparse attention of BLOCKSPARSE, TORCH and FLEX against a dense mask in float64.

Cases are those of tests/fuzz/blocksparse.py: keys that no row sees are NaN.
"""

import dataclasses
import gc
import weakref

import pytest
import torch

from attn_ops import (
    Attention,
    AttentionOptions,
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
    select_backend,
    varlen_attention,
    varlen_metadata,
)
from attn_ops.block_layout import BlocksparseParams, BlockTables, local_strided
from tests.fuzz.blocksparse import BlocksparseCase, check, draw, make, run_rank
from tests.kit.batches import build_metadata
from tests.kit.marks import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("BLOCKSPARSE", "TORCH", "FLEX")


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("first", [0, *slow(*range(4, 32, 4))])
def test_random_layers(backend, first):
    """Every rank gives its slice of what one rank gives for all heads."""
    for seed in range(first, first + 4):
        check(draw(seed, DEVICE, 120), backend, DEVICE)


def case_of(query_lens, seq_lens, **changes) -> BlocksparseCase:
    given = {"block_size": 32, "local_blocks": 1, "vert_stride": 3, "num_heads": 4}
    names = {f.name for f in dataclasses.fields(BlocksparseParams) if f.init}
    given |= {name: changes.pop(name) for name in names & changes.keys()}
    params = BlocksparseParams(max_seqlen=256, num_kv_heads=given.pop("num_kv_heads", 2), **given)
    fields = {
        "head_size": 16, "dtype": torch.float32, "kv_cache_dtype": "auto", "cache_block_size": 16,
        "num_padding_rows": 0, "features": (), "seed": 7,
    }  # fmt: skip
    return BlocksparseCase(
        params=params, query_lens=query_lens, seq_lens=seq_lens, **fields | changes
    )


MIXED = ((1, 1, 0, 20), (5, 133, 0, 85))
DECODE = ((1, 1, 1, 0), (1, 33, 200, 9))


@pytest.mark.parametrize("head_size", [8, 72, 192, *slow(64, 80, 248, 512)])
def test_head_sizes(head_size):
    """Tiles of keys and rows get smaller with large heads."""
    dtype = torch.float16
    check(case_of((1, 9), (40, 70), head_size=head_size, dtype=dtype), "BLOCKSPARSE", DEVICE)
    check(case_of((1, 1), (40, 70), head_size=head_size, dtype=dtype), "BLOCKSPARSE", DEVICE)


@pytest.mark.parametrize(
    ("block_size", "cache_block_size"), [(16, 64), (48, 32), (64, 64), (96, 16), (64, 48)]
)
def test_pages_smaller_and_larger_than_blocks(block_size, cache_block_size):
    sizes = {"block_size": block_size, "cache_block_size": cache_block_size}
    for lengths in (MIXED, DECODE):
        check(case_of(*lengths, **sizes), "BLOCKSPARSE", DEVICE)


def test_groups_of_more_than_32_heads():
    """Units have at most 32 heads, whose bits fit an int32."""
    for lengths in (((1,), (70,)), ((3,), (40,))):
        check(case_of(*lengths, num_heads=40, num_kv_heads=1), "BLOCKSPARSE", DEVICE)


def by_kernel(kernel, *more):
    """What `check` calls instead of the operator; rows of the log-sum-exp begin as NaN."""

    def attend(q, kv_cache, meta, scale, blocksparse):
        lse = torch.full(q.shape[:2], float("nan"), device=q.device)
        size, layout = blocksparse.block_size, blocksparse.tensors()
        options = AttentionOptions(scale, sparse_block_size=size, block_layout=layout, lse=lse)
        return kernel(q, kv_cache, meta.common, options, size, layout, *more), lse

    return attend


@pytest.mark.parametrize("num_splits", [1, 5, *slow(2, 64)])
@pytest.mark.parametrize("homo_head_group", [False, True])
def test_any_number_of_ranges(num_splits, homo_head_group):
    """Ranges of the listed keys, with none left for some programs, and their merge."""
    from attn_ops.backends.blocksparse.triton.decode import decode_attention

    case = case_of(*DECODE, homo_head_group=homo_head_group, num_padding_rows=2)

    check(case, "BLOCKSPARSE", DEVICE, by_kernel(decode_attention, num_splits))


@pytest.mark.parametrize("keys", ["in place", "by rows", "gathered"])
@pytest.mark.parametrize("num_splits", [3, *slow(1)])
@pytest.mark.parametrize("rows", [32, *slow(16)])
def test_forms_of_prefill(keys, num_splits, rows):
    """Keys read in place, by pointers or descriptors of rows, or gathered; split over programs."""
    from attn_ops.backends.blocksparse.triton.prefill import prefill_attention, readable_by_rows
    from attn_ops.backends.triton.prefill import Launch

    gather = keys == "gathered"
    launch = Launch(rows, 32, 4, 1, heads=1, gather=gather, num_splits=num_splits)

    def kernel(q, kv_cache, *arguments):
        assert readable_by_rows(kv_cache, q.dtype, launch.keys)
        return prefill_attention(q, kv_cache, *arguments, launch, keys == "by rows")

    case = case_of(*MIXED, num_padding_rows=3, cache_block_size=64)
    check(case, "BLOCKSPARSE", DEVICE, by_kernel(kernel))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_requests_without_queries_are_not_computed():
    """Between others, with cached tokens that end within a block; the interpreter tells of NaN."""
    check(case_of((3, 0, 18), (5, 39, 18), head_size=16), "BLOCKSPARSE", DEVICE)


def test_caches_that_are_no_rows():
    """Pages smaller than a tile, heads before tokens, odd head sizes, FP8: read by pointers."""
    from attn_ops.backends.blocksparse.triton.prefill import readable_by_rows

    cache, half = torch.zeros(3, 2, 64, 2, 32, dtype=torch.float16), torch.float16
    assert readable_by_rows(cache, half, 64)
    assert not readable_by_rows(cache, half, 128)
    assert not readable_by_rows(cache.transpose(2, 3).contiguous().transpose(2, 3), half, 64)
    assert not readable_by_rows(cache[:, :, :, :1], half, 64)
    assert not readable_by_rows(torch.zeros(3, 2, 64, 2, 80, dtype=half), half, 64)
    assert not readable_by_rows(cache.to(torch.float8_e4m3fn).view(torch.uint8), half, 64)


def test_dense_layers_run_on_the_kernels_of_triton():
    """A model whose layers alternate needs one backend and one step's metadata."""
    specs = [AttentionSpec(4, 2, 16, torch.float32), None]
    specs[1] = dataclasses.replace(specs[0], blocksparse=16)
    table = torch.arange(1, 7, dtype=torch.int32).view(2, 3)
    common = CommonAttentionMetadata.from_lengths([1, 5], [40, 33], table, 16, DEVICE)
    meta = build_metadata("BLOCKSPARSE", common, specs)
    q, cache = torch.randn(6, 4, 16, device=DEVICE), torch.randn(7, 2, 16, 2, 16, device=DEVICE)
    tables = BlockTables(local_strided(BlocksparseParams(48, 4, 2, 16, 48, 1))).to(DEVICE)
    dense = attention(q, cache, meta, 0.25)
    torch.testing.assert_close(attention(q, cache, meta, 0.25, blocksparse=tables), dense)


def test_the_layer():
    """`Attention(blocksparse=...)`: parameters, a layout, or tables that layers share."""
    params = BlocksparseParams(256, 4, 2, 16, 1, 2)
    tables = BlockTables(local_strided(params))
    layers = [Attention(4, 2, 8, blocksparse=b) for b in (params, tables.layout, tables)]
    assert layers[2].blocksparse is tables
    spec = AttentionSpec(4, 2, 8, torch.float32, blocksparse=16)
    assert all(layer.spec(torch.float32) == spec for layer in layers)
    common = CommonAttentionMetadata.from_lengths([40], [60], [[1, 2, 3, 4]], 16)
    meta = build_metadata("TORCH", common, spec)
    q, k, v = torch.randn(40, 4, 8), torch.randn(40, 2, 8), torch.randn(40, 2, 8)
    cache = torch.randn(5, 2, 16, 2, 8)
    outs = [layer(q, k, v, cache.clone(), meta) for layer in layers]
    assert all(torch.equal(outs[0], out) for out in outs)
    dense = Attention(4, 2, 8)(q, k, v, cache.clone(), meta)
    assert not torch.allclose(outs[0], dense)
    assert not layers[0].state_dict()


def test_selection_says_why():
    spec = AttentionSpec(4, 2, 64, torch.bfloat16, blocksparse=64)
    selection = select_backend(spec, block_size=16, device="cuda")
    assert selection.backend.name == "BLOCKSPARSE"
    assert "sparse_block_size must be None, got 64; supported: None" in str(
        selection.reasons_against["TRITON"]
    )
    odd = dataclasses.replace(spec, blocksparse=24)
    with pytest.raises(ValueError, match="sparse_block_size must be a multiple of 16, got 24"):
        select_backend(odd, block_size=16, device="cuda", backend="BLOCKSPARSE")


def test_layouts_that_do_not_fit_a_call():
    case = case_of((1, 9), (40, 70))

    def attend(q, kv_cache, meta, scale, blocksparse):
        other = {
            "heads": local_strided(BlocksparseParams(256, 2, 2, 32, 1, 3)),
            "length": local_strided(BlocksparseParams(64, 4, 2, 32, 1, 3)),
        }
        with pytest.raises(ValueError, match="block_layout must have shapes"):
            attention(q, kv_cache, meta, scale, blocksparse=BlockTables(other["heads"]).to(DEVICE))
        with pytest.raises(ValueError, match=r"max_seq_len must be at most 64, .* got 70"):
            attention(q, kv_cache, meta, scale, blocksparse=BlockTables(other["length"]).to(DEVICE))
        with pytest.raises(ValueError, match="block_layout must be contiguous int32 tensors"):
            attention(q, kv_cache, meta, scale, blocksparse=blocksparse.to("meta"))
        with pytest.raises(ValueError, match="must be given together, got 32 and None"):
            torch.ops.attn_ops.attention(q, kv_cache, meta, scale, sparse_block_size=32)

    run_rank(case, make(case, DEVICE), 0, "BLOCKSPARSE", attend)


def test_batches_that_do_not_fit_are_refused_before_they_are_written():
    layer = Attention(4, 2, 8, blocksparse=BlocksparseParams(32, 4, 2, 16, 1, 2))
    spec = layer.spec(torch.float32)
    common = CommonAttentionMetadata.from_lengths([33], [33], [[1, 2, 3]], 16)
    meta = build_metadata("TORCH", common, spec)
    q, k, cache = torch.randn(33, 4, 8), torch.randn(33, 2, 8), torch.zeros(4, 2, 16, 2, 8)
    with pytest.raises(ValueError, match=r"max_seq_len must be at most 32, .* got 33"):
        layer(q, k, k, cache, meta)
    common = CommonAttentionMetadata.from_lengths([30], [30], [[1, 2]], 16)
    meta = build_metadata("TORCH", common, spec)
    with pytest.raises(ValueError, match="blocksparse must be on cpu, got meta"):
        layer.to("meta")(q[:30], k[:30], k[:30], cache, meta)
    assert not cache.any()


def test_a_step_of_flex_holds_the_tables_that_name_its_masks():
    """Else tables of another layout could take their memory, and the mask be found for those."""
    spec = AttentionSpec(2, 2, 16, torch.float32, blocksparse=16)
    common = CommonAttentionMetadata.from_lengths([60], [60], [[1, 2, 3, 4]], 16)
    meta = build_metadata("FLEX", common, spec)
    tables = BlockTables(local_strided(BlocksparseParams(64, 2, 2, 16, 1, 2)))
    q, cache = torch.randn(60, 2, 16), torch.randn(5, 2, 16, 2, 16)
    attention(q, cache, meta, 0.25, blocksparse=tables)
    held = [weakref.ref(tables.starts), weakref.ref(tables.columns)]
    del tables
    gc.collect()
    assert all(tensor() is not None for tensor in held)


def test_without_a_cache_it_is_refused():
    spec = AttentionSpec(4, 2, 8, torch.float32, blocksparse=16)
    with pytest.raises(ValueError, match="blocksparse must be None without a KV cache, got 16"):
        varlen_metadata([3], spec)
    meta = varlen_metadata([3], dataclasses.replace(spec, blocksparse=None))
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    tables = BlockTables(local_strided(BlocksparseParams(16, 4, 2, 16, 1, 1)))
    with pytest.raises(ValueError, match="blocksparse must be None without a KV cache"):
        varlen_attention(q, k, k, meta, 1.0, blocksparse=tables)
    layout = {"sparse_block_size": 16, "block_layout": tables.tensors()}
    with pytest.raises(ValueError, match="sparse_block_size must be None without a KV cache"):
        torch.ops.attn_ops.varlen_attention(q, k, k, meta, 1.0, **layout)
