"""Shared blocks as a state machine: every request finds its own tokens, and no block is lost."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attn_ops import AttentionSpec, PagedKVCache
from attn_ops.kv_cache import NULL_BLOCK, OutOfBlocksError
from attn_ops.prefixes import NO_MATCH, Match, block_keys

SPEC = AttentionSpec(1, 1, 1, torch.float32)
SIZE = 3


def make_cache(num_blocks: int = 9) -> PagedKVCache:
    return PagedKVCache([SPEC], num_tokens=num_blocks * SIZE, block_size=SIZE)


def begin(cache: PagedKVCache, request, tokens: list[int], room: int = 0) -> Match:
    """The request owns blocks, the found ones first; its partial block is copied."""
    found = cache.match(tokens[:-1], block_keys(tokens, SIZE))
    cache.reserve(request, len(tokens) + room, found)
    cache.copy_partial()
    return found


def write(cache: PagedKVCache, request, tokens: list[int], first: int) -> None:
    """Tokens from position `first` on, as their own keys."""
    blocks = cache.blocks(request)
    for position in range(first, len(tokens)):
        cache.tensors[0][blocks[position // SIZE], :, position % SIZE] = tokens[position]


def run(cache: PagedKVCache, request, tokens: list[int]) -> Match:
    found = begin(cache, request, tokens)
    write(cache, request, tokens, found.num_tokens)
    cache.keep(request, tokens, block_keys(tokens, SIZE))
    return found


def held(cache: PagedKVCache, request, num_tokens: int) -> list[int]:
    rows = cache.tensors[0][cache.blocks(request), 0, :, 0, 0].flatten()
    return rows[:num_tokens].int().tolist()


def snapshot(cache: PagedKVCache) -> tuple:
    tables = {r: (list(t.blocks), t.num_tokens) for r, t in cache.pool.tables.items()}
    return list(cache.pool.free_blocks), list(cache.pool.kept), tables


class Sharing(RuleBasedStateMachine):
    """Requests 0 to 5 over 9 usable blocks of 3 tokens; tokens are 1 or 2, so many are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.tokens: dict[int, list[int]] = {}
        self.written: dict[int, int] = {}
        self.released: dict[int, int] = {}  # blocks that were given back behind a window
        self.kept: list[int] = []  # blocks, the least recently used one first

    @rule(
        request=st.integers(0, 5),
        tokens=st.lists(st.integers(1, 2), max_size=14),
        room=st.integers(0, 5),
    )
    def begin(self, request: int, tokens: list[int], room: int) -> None:
        if request in self.tokens:
            self.reserved(request, len(tokens) + room)
            return
        found = self.cache.match(tokens[:-1], block_keys(tokens, SIZE))
        if not self.reserved(request, len(tokens) + room, found):
            return
        self.cache.copy_partial()
        assert found.num_tokens < max(1, len(tokens)), "the last token is computed"
        assert held(self.cache, request, found.num_tokens) == tokens[: found.num_tokens]
        self.tokens[request], self.written[request] = tokens, found.num_tokens
        self.released[request] = 0

    @precondition(lambda self: self.tokens)
    @rule(pick=st.integers(0, 5), num_tokens=st.integers(0, 30))
    def grow(self, pick: int, num_tokens: int) -> None:
        self.reserved(sorted(self.tokens)[pick % len(self.tokens)], num_tokens)
        with pytest.raises(ValueError, match="num_tokens must not be negative"):
            self.cache.reserve(pick, -1)

    def reserved(self, request: int, num_tokens: int, found: Match = NO_MATCH) -> bool:
        """Whether there was room: of too little, nothing changes."""
        cache, before = self.cache, snapshot(self.cache)
        have = [*cache.blocks(request), *found.blocks]
        num_fresh = max(0, -(-num_tokens // SIZE) - len(have))
        needed = num_fresh + sum(block in self.kept for block in found.blocks)
        assert cache.blocks_needed(request, num_tokens, found) == needed
        num_free = cache.num_free_blocks
        if needed > num_free:
            with pytest.raises(OutOfBlocksError, match=f"needs {needed} more blocks"):
                cache.reserve(request, num_tokens, found)
            assert snapshot(cache) == before
            return False
        cache.reserve(request, num_tokens, found)
        assert cache.num_free_blocks == num_free - needed
        free, kept = before[0][::-1], [b for b in self.kept if b not in found.blocks]
        num_evicted = max(0, num_fresh - len(free))
        assert cache.blocks(request) == [*have, *free[:num_fresh], *kept[:num_evicted]], (
            "free blocks first, then the least recently used"
        )
        self.kept = kept[num_evicted:]
        if found.source in self.kept:
            self.kept.remove(found.source)
            self.kept.append(found.source)
        return True

    @rule(request=st.integers(0, 5), number=st.integers(1, 14))
    def compute(self, request: int, number: int) -> None:
        if request not in self.tokens:
            return
        tokens = self.tokens[request]
        end = min(len(tokens), self.written[request] + number)
        write(self.cache, request, tokens[:end], self.written[request])
        self.written[request] = end
        self.cache.keep(request, tokens[:end], block_keys(tokens[:end], SIZE))

    @rule(request=st.integers(0, 5))
    def free(self, request: int) -> None:
        if request not in self.tokens:
            with pytest.raises(ValueError, match="request must own blocks"):
                self.cache.free(request)
            return
        blocks = self.cache.blocks(request)
        self.cache.free(request)
        del self.tokens[request]
        self.given_back(blocks)

    @rule(request=st.integers(0, 5), number=st.integers(0, 5))
    def release(self, request: int, number: int) -> None:
        number = min(number, self.written.get(request, 0) // SIZE)
        if request not in self.tokens:
            return
        blocks = self.cache.blocks(request)
        self.cache.release(request, number)
        self.released[request] = max(number, self.released[request])
        number = self.released[request]
        assert self.cache.blocks(request) == [NULL_BLOCK] * number + blocks[number:]
        self.given_back([b for b in blocks[:number] if b])

    def given_back(self, blocks: list[int]) -> None:
        owned = {b for r in self.tokens for b in self.cache.blocks(r)}
        self.kept += [
            b for b in reversed(blocks) if b not in owned and b in self.cache.pool.index.contents
        ]

    @rule()
    def forget(self) -> None:
        self.cache.forget_prefixes()
        self.kept = []
        assert self.cache.num_kept_blocks == 0

    @rule()
    def free_all(self) -> None:
        for request in list(self.tokens):
            self.free(request)
        assert self.cache.num_free_blocks == 9

    @rule(requests=st.lists(st.integers(0, 5), max_size=4))
    def block_table(self, requests: list[int]) -> None:
        unknown = next((r for r in requests if r not in self.tokens), None)
        if unknown is not None:  # the null block would be shared with every other such request
            with pytest.raises(ValueError, match=f"request must own blocks, got {unknown}"):
                self.cache.block_table(requests)
            return
        table_SM = self.cache.block_table(requests)
        assert table_SM.dtype == torch.int32
        for row_M, request in zip(table_SM.tolist(), requests, strict=True):
            blocks = self.cache.blocks(request)
            assert row_M == blocks + [NULL_BLOCK] * (len(row_M) - len(blocks))

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        pool = self.cache.pool
        owners = Counter(b for r in self.tokens for b in self.cache.blocks(r) if b)
        assert owners == pool._owners
        assert sorted([*owners, *pool.free_blocks, *pool.kept]) == list(range(1, 10))
        assert list(pool.kept) == self.kept
        assert self.cache.num_free_blocks == 9 - len(owners)

    @invariant()
    def requests_hold_their_tokens(self) -> None:
        for request, tokens in self.tokens.items():
            begin, number = self.released[request] * SIZE, self.written[request]
            assert held(self.cache, request, number)[begin:] == tokens[begin:number]

    @invariant()
    def what_is_known_is_there(self) -> None:
        index = self.cache.pool.index
        for block, content in index.contents.items():
            rows = self.cache.tensors[0][block, 0, : len(content.tokens), 0, 0]
            assert tuple(rows.int().tolist()) == content.tokens
            assert index._blocks[content.key] == block
        assert len(index._blocks) == len(index.contents)
        assert sum(map(len, index._children.values())) == len(index.contents)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_full_blocks_are_shared_and_a_part_is_copied():
    cache = make_cache()
    assert run(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8]) == Match()
    found = run(cache, "b", [1, 2, 3, 4, 5, 6, 7, 9])
    assert (found.num_tokens, found.blocks) == (7, tuple(cache.blocks("a")[:2]))
    assert found.source == cache.blocks("a")[2]
    assert cache.blocks("b")[:2] == cache.blocks("a")[:2]
    assert cache.blocks("b")[2] != cache.blocks("a")[2]
    assert held(cache, "a", 8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert held(cache, "b", 8) == [1, 2, 3, 4, 5, 6, 7, 9]
    cache.free("a")
    assert held(cache, "b", 8) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert cache.num_free_blocks == 9 - 3


def test_released_blocks_are_found_by_others():
    cache = make_cache()
    run(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    cache.release("a", 2)
    cache.release("a", 1)
    assert cache.blocks("a")[:2] == [NULL_BLOCK] * 2
    assert cache.num_free_blocks == 9 - 1
    cache.keep("a", [1, 2, 3, 4, 5, 6, 7, 8], block_keys([1, 2, 3, 4, 5, 6, 7, 8], SIZE))
    assert begin(cache, "b", [1, 2, 3, 4, 5, 6, 7, 8]).num_tokens == 7
    assert held(cache, "b", 7) == [1, 2, 3, 4, 5, 6, 7]
    assert cache.reserve("a", 12)[:2] == [NULL_BLOCK] * 2
    assert cache.num_free_blocks == 9 - 5
    cache.free("a")
    assert cache.num_free_blocks == 9 - 3
    with pytest.raises(ValueError, match=r"^request must own blocks, got 'a'"):
        cache.release("a", 1)


def test_a_source_that_is_taken_for_the_copy_itself():
    """The only block that is left is the one whose tokens are wanted."""
    cache = make_cache(2)
    run(cache, "a", [1, 2])
    cache.reserve("b", 3)
    cache.free("a")
    assert begin(cache, "c", [1, 2, 3]).num_tokens == 2
    assert held(cache, "c", 2) == [1, 2]
    assert cache.num_kept_blocks == 0


def test_a_block_that_is_not_copied_yet_is_not_kept():
    cache = make_cache()
    run(cache, "a", [1, 2])
    keys = block_keys([1, 2, 3], SIZE)
    cache.reserve("b", 3, cache.match([1, 2], keys))
    cache.free("a")
    cache.keep("b", [1, 2, 3], keys)
    assert cache.match([1, 2, 3], keys).num_tokens == 2
    cache.free("b")
    cache.copy_partial()  # of a request that is gone: nothing
