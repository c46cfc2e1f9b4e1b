"""The arithmetic of a cache's budget, its layouts and blocks of windows.

tests/attn_ops/test_block_pool.py has the allocator as a state machine.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_ops import AttentionSpec, LatentShape, PagedKVCache, kv_cache
from attn_ops.kv_cache import NULL_BLOCK, OutOfBlocksError
from attn_ops.metadata import set_kv_cache_layout
from attn_ops.prefixes import block_keys

SPEC = AttentionSpec(4, 2, 8, torch.float32)


def test_returned_blocks_are_a_copy():
    cache = PagedKVCache([SPEC], num_tokens=16, block_size=4)
    cache.reserve("a", 8).append(99)
    cache.blocks("a").append(99)
    assert cache.blocks("a") == [1, 2]


SPECS = st.builds(
    lambda kv, group, head, dtype: AttentionSpec(kv * group, kv, head, dtype),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


@settings(max_examples=50, deadline=None)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=3),
    block_size=st.integers(1, 7),
    num_tokens=st.integers(1, 40),
    spare=st.integers(0, 300),
)
def test_budget_arithmetic(specs, block_size, num_tokens, spare):
    by_tokens = PagedKVCache(specs, num_tokens=num_tokens, block_size=block_size)
    assert num_tokens <= by_tokens.num_usable_tokens < num_tokens + block_size
    assert by_tokens.num_bytes == sum(t.numel() * t.element_size() for t in by_tokens.tensors)
    assert by_tokens.num_free_blocks == by_tokens.num_blocks - 1
    budget = by_tokens.num_bytes + spare
    by_bytes = PagedKVCache(specs, memory_bytes=budget, block_size=block_size)
    assert by_bytes.num_bytes <= budget < by_bytes.num_bytes + by_bytes.bytes_per_block
    for tensor, spec in zip(by_bytes.tensors, specs, strict=True):
        sizes = (block_size, spec.num_kv_heads, spec.head_size)
        assert tensor.shape == (by_bytes.num_blocks, 2, *sizes)
        assert tensor.dtype == spec.dtype
        assert not tensor.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of num_tokens and memory_bytes"),
        ({"num_tokens": 4, "memory_bytes": 4}, "exactly one of num_tokens and memory_bytes"),
        ({"num_tokens": 0}, "at least one block"),
        ({"num_tokens": -7}, "at least one block"),
        ({"memory_bytes": 100}, "at least one block"),
        ({"memory_bytes": 2 * 2 * 16 * 2 * 8 * 4 - 1}, "at least one block"),
        ({"num_tokens": 4, "block_size": 0}, "block_size must be positive, got 0"),
        ({"memory_bytes": 4096, "specs": []}, "must"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(**{"specs": [SPEC]} | arguments)


def test_width_of_the_block_table():
    cache = PagedKVCache([SPEC], num_tokens=16, block_size=4)
    cache.reserve("a", 9)
    cache.reserve("b", 0)
    assert cache.block_table(["a", "b"], width=5).tolist() == [[1, 2, 3, 0, 0], [0, 0, 0, 0, 0]]
    assert cache.block_table([]).shape == (0, 1)
    with pytest.raises(ValueError, match="width must be at least 3, got 2"):
        cache.block_table(["a"], width=2)


def test_layouts_differ_in_strides_alone():
    """The setting counts where no layout is given."""
    for layout in ("NHD", "HND"):
        cache = PagedKVCache([SPEC], num_tokens=35, block_size=4, cache_layout=layout)
        (tensor,) = cache.tensors
        assert (tensor.shape, cache.cache_layout) == ((10, 2, 4, 2, 8), layout)
        assert (tensor.transpose(2, 3) if layout == "HND" else tensor).is_contiguous()
    set_kv_cache_layout("HND")
    try:
        assert PagedKVCache([SPEC], num_tokens=4).cache_layout == "HND"
    finally:
        set_kv_cache_layout(None)
    assert PagedKVCache([SPEC], num_tokens=4).cache_layout == "NHD"
    with pytest.raises(ValueError, match="cache_layout must be a known name, got 'DNH'"):
        PagedKVCache([SPEC], num_tokens=4, cache_layout="DNH")


BYTES = 4 * 2 * 4 * 2 * 8 * 4  # of 3 blocks and the null block


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"num_tokens": 12}, r"num_tokens .* of cpu of 2,047 bytes, got 12 tokens, .* 2,048 bytes"),
        ({"memory_bytes": BYTES}, r"memory_bytes .* of cpu of 2,047 bytes, got 2,048 bytes"),
    ],
)
def test_a_cache_of_more_than_the_memory(monkeypatch, size, message):
    monkeypatch.setattr(kv_cache, "_memory_of", lambda device: BYTES)
    PagedKVCache([SPEC], block_size=4, **size)
    monkeypatch.setattr(kv_cache, "_memory_of", lambda device: BYTES - 1)
    with pytest.raises(ValueError, match=f"^{message}$"):
        PagedKVCache([SPEC], block_size=4, **size)


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (torch.OutOfMemoryError("2 KiB are free"), True),
        (RuntimeError("can't allocate memory"), True),
        (RuntimeError("no driver"), False),
    ],
)
def test_an_allocation_that_fails(monkeypatch, error, is_of_memory):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "zeros", fail)
    if not is_of_memory:
        with pytest.raises(RuntimeError, match=f"^{error}$"):
            PagedKVCache([SPEC], num_tokens=12, block_size=4)
        return
    with pytest.raises(ValueError, match=f"got 12 tokens, which take 2,048 bytes: {error}$"):
        PagedKVCache([SPEC], num_tokens=12, block_size=4)
    monkeypatch.setattr(kv_cache, "_memory_of", lambda device: None)  # as of devices like meta
    with pytest.raises(ValueError, match=r"^num_tokens .* into the memory of cpu, got 12 tokens"):
        PagedKVCache([SPEC], num_tokens=12, block_size=4)


@pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("kv_cache_dtype", "size"), [("auto", 2), ("fp8_e4m3", 1)])
def test_latent_layers_hold_one_latent_a_token(cache_layout, kv_cache_dtype, size):
    shape = LatentShape(16, 8, 4, 6)
    spec = AttentionSpec.of_latent(4, shape, torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    cache = PagedKVCache([spec, SPEC], num_tokens=35, block_size=4, cache_layout=cache_layout)
    assert cache.tensors[0].shape == (10, 4, 20)
    assert cache.tensors[0].is_contiguous()
    assert cache.tensors[1].shape == (10, 2, 4, 2, 8)
    assert cache.bytes_per_block == 4 * 20 * size + 2 * 4 * 2 * 8 * 4
    assert cache.num_bytes == sum(t.nbytes for t in cache.tensors)


WINDOWED = AttentionSpec(4, 2, 8, torch.float32, sliding_window=6)
CHUNKED = AttentionSpec(4, 1, 16, torch.float32, attention_chunk_size=8)


def split_cache(num_tokens=40, window_blocks=5) -> PagedKVCache:
    specs = [SPEC, WINDOWED, CHUNKED]
    return PagedKVCache(specs, num_tokens=num_tokens, window_blocks=window_blocks, block_size=4)


def test_layers_with_a_window_have_blocks_of_their_own():
    cache = split_cache()
    assert [t.shape[0] for t in cache.tensors] == [11, 5, 5]
    assert cache.own_blocks == [False, True, True]
    assert cache.window == 8
    assert cache.num_bytes == sum(t.numel() * t.element_size() for t in cache.tensors)
    again = PagedKVCache(cache.specs, memory_bytes=cache.num_bytes, window_blocks=5, block_size=4)
    assert (again.num_blocks, again.num_bytes) == (cache.num_blocks, cache.num_bytes)
    assert cache.has_room("a", 40, window_tokens=16)
    assert not cache.has_room("a", 40, window_tokens=17)
    assert not cache.has_room("a", 41, window_tokens=16)
    assert not cache.has_room("a", 40, window_tokens=16, spare=1)
    cache.reserve("a", 20, window_tokens=9)
    assert cache.rooms("a") == (20, 12)
    cache.release("a", 2)
    assert cache.window_pool is not None
    assert cache.window_pool.tables["a"].blocks[:2] == [NULL_BLOCK, NULL_BLOCK]
    assert NULL_BLOCK not in cache.blocks("a"), "layers that see all keys keep theirs"
    assert cache.rooms("a") == (20, 12)
    assert cache.has_room("b", 4, window_tokens=12)
    cache.free("a")
    assert cache.num_free_blocks == 10
    assert cache.window_pool.num_available == 4


def test_both_kinds_have_block_tables():
    cache = split_cache()
    cache.reserve("a", 12)
    cache.release("a", 1)
    assert cache.block_table(["a"]).tolist() == [cache.blocks("a")]
    own = cache.block_table(["a"], 4, windows=True)
    assert cache.window_pool is not None
    released, *blocks = cache.window_pool.tables["a"].blocks
    assert released == NULL_BLOCK, "where padding may have written NaN"
    assert own.tolist() == [[blocks[0], *blocks, NULL_BLOCK]]
    with pytest.raises(ValueError, match="windows must be False without window_blocks"):
        PagedKVCache([SPEC], num_tokens=40).block_table([], windows=True)


@pytest.mark.parametrize(("num_tokens", "window_tokens"), [(41, 4), (8, 17)])
def test_too_few_blocks_of_either_kind_change_nothing(num_tokens, window_tokens):
    cache = split_cache()
    cache.reserve("a", 4, window_tokens=4)
    before = list(cache.pool.free_blocks), cache.blocks("a"), cache.rooms("a")
    with pytest.raises(OutOfBlocksError, match=r"needs .* more blocks"):
        cache.reserve("a", num_tokens, window_tokens=window_tokens)
    assert (list(cache.pool.free_blocks), cache.blocks("a"), cache.rooms("a")) == before


def test_a_prefix_is_as_long_as_both_kinds_hold_it():
    """A window of 8 tokens: what follows 16 tokens sees the last two blocks, or a part of three."""
    cache, tokens = split_cache(window_blocks=9), list(range(18))
    keys = block_keys(tokens, 4)
    cache.reserve("a", 18, window_tokens=18)
    cache.keep("a", tokens, keys)
    cache.release("a", cache.first_seen(18))
    assert cache.first_seen(18) == 2
    cache.free("a")
    assert cache.window_pool is not None
    match = cache.match(tokens[:17], keys)
    assert match.num_tokens == 16
    assert match.source is None, "parts of blocks are not copied"
    assert match.window_blocks is not None
    assert len(match.blocks) == len(match.window_blocks) == 4
    assert match.window_blocks[:2] == (NULL_BLOCK, NULL_BLOCK)
    assert NULL_BLOCK not in match.window_blocks[2:]
    assert cache.has_room("b", 40, match, 20)
    cache.reserve("b", 40, match, 20)
    assert cache.rooms("b") == (40, 20)
    assert cache.window_pool.tables["b"].blocks[:4] == list(match.window_blocks)
    cache.free("b")
    cache.window_pool.index.drop(match.window_blocks[3])
    assert cache.match(tokens[:17], keys).num_tokens == 12, "those behind the window are kept too"
    cache.forget_prefixes()
    assert cache.match(tokens[:17], keys).num_tokens == 0
    assert (cache.num_free_blocks, cache.window_pool.num_available) == (10, 8)


@pytest.mark.parametrize("specs", [[SPEC], [WINDOWED], [SPEC, WINDOWED]])
def test_own_blocks_are_for_layers_of_both_kinds(specs):
    number = 1 if len(specs) == 2 else 5
    with pytest.raises(ValueError, match=f"window_blocks must be at least 2, .* got {number} for"):
        PagedKVCache(specs, num_tokens=40, window_blocks=number)
