"""copy_blocks, swap_blocks and gather_kv against plain loops.

T tokens, S requests, M blocks a request may own, K kv heads, H head size, P blocks, B block size.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_ops import copy_blocks, gather_kv, swap_blocks
from attn_ops.ops.cache_blocks import _runs
from tests.kit.marks import slow
from tests.kit.operators import opcheck

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ops = torch.ops.attn_ops
NONE = torch.empty(0, 2, dtype=torch.int64)


def make_cache(num_blocks: int = 6, dtype: torch.dtype = torch.float32, head_size: int = 8):
    """[P, 2, 4, 2, H]: numbers no two blocks of which are equal."""
    shape = (num_blocks, 2, 4, 2, head_size)
    if dtype == torch.uint8:
        return torch.randint(0, 120, shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def pairs_of(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def moved(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """What `target` must hold afterwards, by a loop."""
    wanted = target.clone()
    for read, written in pairs.tolist():
        wanted[written] = source[read]
    return wanted


@st.composite
def block_pairs(draw, num_sources: int, first: int, num_targets: int):
    """Any sources, no destination twice; chains and cycles are common."""
    targets = draw(st.lists(st.integers(first, num_targets - 1), unique=True))
    return pairs_of(*((draw(st.integers(0, num_sources - 1)), target) for target in targets))


def compiled(function, backend: str = "aot_eager"):
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


@given(block_pairs(7, 1, 7))
def test_copies_happen_at_once(pairs):
    caches = [make_cache(7), make_cache(7, torch.bfloat16, 4), make_cache(7, torch.uint8)]
    wanted = [moved(cache, cache, pairs) for cache in caches]
    copy_blocks(caches, pairs)
    for cache, want in zip(caches, wanted, strict=True):
        assert torch.equal(cache, want)


@pytest.mark.parametrize(
    "pairs", [((1, 2), (2, 3), (3, 4)), ((1, 2), (2, 1)), ((2, 2),), ((0, 1), (0, 1)), ()], ids=str
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_chains_cycles_and_nothing(pairs, backend):
    copy = compiled(copy_blocks, backend)
    caches, pairs = [make_cache(), make_cache()], pairs_of(*pairs)
    wanted = [moved(cache, cache, pairs) for cache in caches]
    copy(caches, pairs)
    for cache, want in zip(caches, wanted, strict=True):
        assert torch.equal(cache, want)


def test_copies_reach_strided_and_interleaved_caches():
    """Layers as views of one allocation, heads outside of tokens; the rest of it stays."""
    whole = torch.randn(6, 3, 2, 2, 4, 8)  # [P, layers, 2, K, B, H]
    before, pairs = whole.clone(), pairs_of((1, 2), (2, 5))
    copy_blocks([whole[:, 0].transpose(2, 3), whole[:, 2].transpose(2, 3)], pairs)
    assert torch.equal(whole[:, 1], before[:, 1])
    for layer in (0, 2):
        assert torch.equal(whole[:, layer], moved(before[:, layer], before[:, layer], pairs))


def test_no_caches_and_caches_of_different_sizes():
    copy_blocks([], pairs_of((1, 2)))
    small, large = make_cache(3), make_cache(9)
    with pytest.raises(ValueError, match=r"destinations of at least 1 and below 3, got 3"):
        copy_blocks([large, small], pairs_of((1, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, *slow(*FLOATS[:3])], ids=str)
def test_opcheck_copy_and_swap(dtype):
    for pairs in (pairs_of((1, 2), (2, 3)), pairs_of((4, 1)), NONE):
        caches = [make_cache(dtype=dtype), make_cache(8, dtype)]
        opcheck(ops.copy_blocks.default, (caches, pairs))
        opcheck(ops.swap_blocks.default, (*caches, pairs))
    opcheck(ops.copy_blocks.default, ([], NONE))


@pytest.mark.slow
def test_compiled_copies_of_a_clone_and_of_the_cache():
    """Inductor may hand in a view of the cache where the caller cloned it (pytorch#198031)."""
    pairs = pairs_of((1, 2), (2, 3), (3, 1))

    def swap_from_clone(cache, pairs):
        old = cache.clone()
        swap_blocks(old, cache, pairs)
        return cache + 1

    def copy_in_clone(cache, pairs):
        old = cache.clone()
        copy_blocks([cache], pairs)
        return old + 1

    for function in (swap_from_clone, copy_in_clone):
        for backend in ("aot_eager", "inductor"):
            eager, traced = (x := make_cache()), x.clone()
            wanted = function(eager, pairs)
            got = compiled(function, backend)(traced, pairs)
            assert torch.equal(traced, eager), (function.__name__, backend)
            assert torch.equal(got, wanted), (function.__name__, backend)


WRONG_PAIRS = {
    "dtype": (torch.tensor([[1, 2]]).int(), "^block_pairs must be int64 of shape"),
    "rank": (torch.tensor([1, 2]), "^block_pairs must be int64 of shape"),
    "columns": (torch.tensor([[1, 2, 3]]), "^block_pairs must be int64 of shape"),
    "source": (pairs_of((1, 2), (6, 3)), "sources of at least 0 and below 6, got 6"),
    "negative source": (pairs_of((-1, 2)), "sources of at least 0 and below 6, got -1"),
    "destination": (pairs_of((1, 2), (2, 6)), "below 6, got 6"),
    "negative destination": (pairs_of((1, -2)), "below 6, got -2"),
    "two sources": (pairs_of((1, 3), (2, 3)), "one source for each destination.* block 3"),
    "null block": (pairs_of((1, 2), (3, 0)), "destinations of at least 1 and below 6, got 0"),
}


@pytest.mark.parametrize("case", WRONG_PAIRS)
@pytest.mark.parametrize("copy", ["copy_blocks", "swap_blocks"])
def test_wrong_pairs_are_refused_and_write_nothing(case, copy):
    pairs, message = WRONG_PAIRS[case]
    cache, target = make_cache(), make_cache()
    before, target_before = cache.clone(), target.clone()
    if copy == "swap_blocks" and case == "null block":
        swap_blocks(cache, target, pairs)  # a pool on the host may use its block 0
        assert torch.equal(target, moved(cache, target_before, pairs))
        return
    with pytest.raises(ValueError, match=message):
        copy_blocks([cache], pairs) if copy == "copy_blocks" else swap_blocks(cache, target, pairs)
    assert torch.equal(cache, before)
    assert torch.equal(target, target_before)


def test_wrong_caches_are_refused_and_write_nothing():
    cache, pairs = make_cache(), pairs_of((1, 2))
    before = cache.clone()
    for caches, message in (
        ([cache, cache[0]], r"^kv_caches\[1\] must have shape"),
        ([cache, cache[:, :1]], r"^kv_caches\[1\] must have shape"),
        ([cache, cache], "^kv_caches must be different tensors"),
        ([cache, cache.view_as(cache)], "^kv_caches must be different tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_blocks(caches, pairs)
    for source, message in (
        (cache[0], "^source must have shape"),
        (make_cache(head_size=4), "^target must have blocks as the source's"),
        (make_cache(dtype=torch.float16), "^target must have blocks as the source's"),
    ):
        with pytest.raises(ValueError, match=message):
            swap_blocks(source, cache, pairs)
    assert torch.equal(cache, before)


@given(block_pairs(5, 0, 8), block_pairs(8, 0, 8))
def test_swap_in_and_out_and_within_one_tensor(pairs, inner):
    source, target = make_cache(5), make_cache(8)
    before, wanted = source.clone(), moved(source, target, pairs)
    swap_blocks(source, target, pairs)
    assert torch.equal(target, wanted)
    assert torch.equal(source, before)
    wanted = moved(target, target, inner)
    swap_blocks(target, target, inner)
    assert torch.equal(target, wanted), "everything is read first"


def test_neighbours_are_one_copy():
    """In any order, and if a pair is there twice."""
    found = _runs(pairs_of((5, 9), (2, 6), (6, 8), (1, 5), (4, 7), (1, 5)))
    runs = [(r.start, w.start, r.stop - r.start) for r, w in found]
    assert runs == [(1, 5, 2), (4, 7, 1), (5, 9, 1), (6, 8, 1)]


def test_swap_across_devices_traces():
    """Fakes of CUDA tensors need no GPU."""
    with FakeTensorMode():
        on_gpu, on_host = torch.empty(6, 2, 4, 2, 8, device="cuda"), torch.empty(9, 2, 4, 2, 8)
        pairs = torch.empty(3, 2, dtype=torch.int64)
        assert ops.swap_blocks(on_gpu, on_host, pairs) is None
        assert ops.swap_blocks(on_host, on_gpu, pairs) is None


def gathered(cache, table, seq_lens, num_tokens):
    """By a loop over tokens."""
    k, v = torch.zeros(2, num_tokens, *cache.shape[3:], dtype=cache.dtype)
    rows = [(r, p) for r, n in enumerate(seq_lens.tolist()) for p in range(n)]
    for row, (request, position) in enumerate(rows[:num_tokens]):
        if position // 4 < table.shape[1]:
            k[row], v[row] = cache[table[request, position // 4], :, position % 4]
    return k, v


def poisoned(seq_lens: list[int], dtype: torch.dtype = torch.float32, width: int | None = None):
    """A cache that is NaN but where tokens stand, and a table of garbage but for their blocks."""
    width = max([1, *(-(-n // 4) for n in seq_lens)]) if width is None else width
    num_blocks = len(seq_lens) * width + 2
    cache = torch.full((num_blocks, 2, 4, 2, 8), float("nan"), dtype=dtype)
    order = torch.randperm(num_blocks - 1)[: len(seq_lens) * width] + 1
    table = order.int().view(len(seq_lens), width)
    for request, n in enumerate(seq_lens):
        for position in range(min(n, width * 4)):
            cache[table[request, position // 4], :, position % 4] = torch.randn(2, 2, 8).to(dtype)
        table[request, -(-n // 4) :] = 99_999
    return cache, table, torch.tensor(seq_lens, dtype=torch.int32)


@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(-3, 5),
    st.sampled_from([None, None, 0, 1]),
    st.sampled_from(FLOATS),
)
@settings(max_examples=200)
def test_gather(seq_lens, more, width, dtype):
    cache, table, lengths = poisoned(seq_lens, dtype, width)
    num_tokens = max(0, sum(seq_lens) + more)
    got = gather_kv(cache, table, lengths, num_tokens)
    for x, want in zip(got, gathered(cache, table, lengths, num_tokens), strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gather_compiled_equals_eager(backend, as_dynamic, num_graphs):
    def twice(*given):
        k, v = gather_kv(*given)
        return k * 2, v

    gather, before = compiled(twice, backend), num_graphs()
    for seq_lens in ([5, 0, 1], [9], [1, 1, 8, 3]):
        cache, table, lengths = poisoned(seq_lens, width=5)
        cache = torch.cat([cache, cache, cache])[:21]  # the cache's size does not change
        num_tokens = sum(seq_lens) + 5  # in the first batch unlike every other size
        with as_dynamic():
            got = gather(cache, table, lengths, num_tokens)
        k, v = gathered(cache, table, lengths, num_tokens)
        assert torch.equal(got[0], k * 2)
        assert torch.equal(got[1], v)
    assert num_graphs() - before == 1


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_gather_dequantises(name, dtype, scaled):
    cache, table, lengths = poisoned([5, 0, 3])
    stored = cache.nan_to_num(0).to(FP8[name])
    scales = [torch.tensor([0.37]), torch.tensor([1.9])] if scaled else [None, None]
    meant = gathered(stored.to(torch.float64), table, lengths, 9)
    given = (stored.view(torch.uint8), table, lengths, 9)
    options = {"kv_cache_dtype": name, "k_scale": scales[0], "v_scale": scales[1], "dtype": dtype}
    for x, want, scale in zip(gather_kv(*given, **options), meant, scales, strict=True):
        assert x.dtype == dtype
        want = want if scale is None else want * scale
        tolerance = max(torch.finfo(dtype).eps, 1e-15)
        torch.testing.assert_close(x.double(), want, rtol=tolerance, atol=0)
    opcheck(ops.gather_kv.default, given, options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_opcheck_gather(dtype):
    for seq_lens, num_tokens in (([5, 0, 1], 8), ([4], 1), ([], 0), ([], 2), ([0], 0)):
        given = (*poisoned(seq_lens, dtype), num_tokens)
        opcheck(ops.gather_kv.default, given)
        opcheck(ops.gather_kv.default, given, {"dtype": torch.float32})


def test_gathered_tensors_are_contiguous_and_apart():
    cache, table, lengths = poisoned([5, 2])
    strided = cache.transpose(2, 3).contiguous().transpose(2, 3)
    got, wanted = gather_kv(strided, table, lengths, 9), gathered(cache, table, lengths, 9)
    for x, want in zip(got, wanted, strict=True):
        assert x.is_contiguous()
        assert torch.equal(x, want)
    got[0].fill_(7)
    assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache": torch.zeros(6, 2, 4, 2)}, "^kv_cache must have shape"),
        ({"kv_cache": make_cache(dtype=torch.uint8)}, "^kv_cache.dtype must fit"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "^kv_cache.dtype must fit.*supported: torch.uint8"),
        ({"kv_cache_dtype": "int4"}, "^kv_cache_dtype must be known, got 'int4'; supported: auto"),
        ({"seq_lens": torch.tensor([5, 2])}, "^seq_lens must have dtype torch.int32"),
        ({"block_table": torch.tensor([[1, 2], [3, 4]])}, "^block_table must have dtype"),
        ({"block_table": torch.zeros(3, 2).int()}, r"^block_table must have shape \[2, any\]"),
        ({"dtype": torch.int32}, "^dtype must fit kv_cache_dtype auto, got torch.int32"),
        ({"kv_cache": make_cache(dtype=torch.uint8), "kv_cache_dtype": "fp8_e5m2"}, "^dtype must"),
        ({"k_scale": torch.ones(2)}, "^k_scale must be"),
    ],
)
def test_wrong_gathers_are_refused(change, message):
    cache, table, lengths = poisoned([5, 2])
    arguments = {"kv_cache": cache, "block_table": table, "seq_lens": lengths, "num_tokens": 7}
    with pytest.raises(ValueError, match=message):
        gather_kv(**(arguments | change))
