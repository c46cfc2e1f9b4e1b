"""Which way a request takes, and which keys are up-projected together: plain numbers.

The decode way attends to the latents themselves; the prefill way up-projects them to keys and
values, in chunks that fit into the workspace. A chunk is causal where it holds the last keys of
its requests, else its keys are context that every row sees.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

SHORT_QUERY_LEN = 8
"""Queries up to this length take the decode way, whatever their context."""

LONG_CONTEXT_QUERY_LEN = 128
"""The same for queries over a context much longer than they are.

Counted in products: with P = V = 128, R = 64 and Lkv = 512 both ways are equal at 171 rows.
Measured on one H200 (2026-11-23, `benchmarks.mla ways`), the decode way took 0.13 to 0.84 of the
prefill way's time with up to 64 rows over 1,024 tokens or more, 1.03 to 2.3 with 256 rows over up
to 8,192.
"""

MAX_WORKSPACE_TOKENS = 128 * 1024
"""Largest workspace of the size rule."""


def takes_decode_way(query_len: int, seq_len: int) -> bool:
    """Whether a request attends to the latents themselves.

    For one row and one key the decode way takes 2 Lkv + R products a head, the prefill way
    P + R + V. But the prefill way up-projects every key of the context, Lkv (P + V) a head.
    """
    context = seq_len - query_len
    if query_len <= SHORT_QUERY_LEN or seq_len == 0:
        return True
    return query_len * seq_len <= LONG_CONTEXT_QUERY_LEN * context


def workspace_tokens(max_model_len: int, max_num_seqs: int, block_size: int) -> int:
    """Tokens of a workspace: 8 requests of full length or 4 pages a request, at most 128 Ki.

    Args:
        max_model_len: tokens of the longest request.
        max_num_seqs: most requests of a batch.
        block_size: tokens of a page.
    """
    wanted = max(8 * max_model_len, 4 * max_num_seqs * block_size)
    return min(wanted, MAX_WORKSPACE_TOKENS)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Neighbouring query rows of one request, and the keys that the last of them sees."""

    request: int  # its place in the batch
    first: int  # row of the batch
    count: int
    seq_len: int  # keys up to the last row's own

    @property
    def context(self) -> int:
        """Keys before those of these rows."""
        return self.seq_len - self.count


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of one request that a chunk up-projects for some rows."""

    rows: Rows
    start: int  # position of the first key
    count: int


@dataclasses.dataclass(frozen=True)
class ChunkOfKeys:
    """Keys of several requests that are up-projected together. No request has none of them."""

    causal: bool  # the keys are the last that the rows see; else all rows see all of them
    keys: tuple[Keys, ...]

    @property
    def cu_keys(self) -> list[int]:
        """Keys before each request's, and all."""
        return cumulative(k.count for k in self.keys)

    @property
    def num_keys(self) -> int:
        return sum(k.count for k in self.keys)

    @property
    def max_keys(self) -> int:
        """Of one request."""
        return max(k.count for k in self.keys)


def cumulative(counts: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(counts, initial=0))


def packed_chunks(rows: Sequence[Rows], num_tokens: int, page_size: int) -> list[ChunkOfKeys]:
    """The context of all rows in as few chunks as there can be: each is filled before the next.

    A chunk ends within a request at a page's end, and holds the keys of neighbouring rows alone.
    """
    chunks: list[list[Keys]] = [[]]
    room = num_tokens
    for r in rows:
        start = 0
        while start < r.context:
            count = min(r.context - start, room)
            if start + count < r.context:
                count = count // page_size * page_size
            if count == 0:
                chunks.append([])
                room = num_tokens
                continue
            chunks[-1].append(Keys(r, start, count))
            start, room = start + count, room - count
    return [ChunkOfKeys(False, tuple(keys)) for keys in chunks if keys]


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """What the prefill way does: rows in the order in which it takes them, and chunks of keys.

    The causal chunks come first; each row is in one of them. A chunk's rows are neighbours in
    `rows`. Rows of requests whose keys all fit are in no other chunk.
    """

    rows: tuple[Rows, ...]
    chunks: tuple[ChunkOfKeys, ...]


def plan_prefill(rows: Sequence[Rows], num_tokens: int, page_size: int) -> PrefillPlan:
    """Chunks that up-project every key once for its rows, `num_tokens` of them at most.

    A request's keys are taken whole, new ones and context together, where they fit into a chunk:
    that needs no merging. Of longer ones the context is chunked; of all, where that takes fewer
    chunks. More rows than the workspace has tokens are taken as several requests, each the context
    of the next.

    Raises:
        ValueError: a page does not fit into the workspace.
    """
    if num_tokens < page_size:
        raise ValueError(
            f"num_tokens must be at least a page of {page_size} tokens, got {num_tokens}"
        )
    parts = [part for r in rows for part in _split(r, num_tokens)]
    plan = _planned(parts, [r.seq_len <= num_tokens for r in parts], num_tokens, page_size)
    if len(plan.chunks) <= 2:
        return plan
    apart = _planned(parts, [not r.context for r in parts], num_tokens, page_size)
    return min(plan, apart, key=lambda p: len(p.chunks))


def _planned(
    parts: Sequence[Rows], is_whole: Sequence[bool], num_tokens: int, page_size: int
) -> PrefillPlan:
    """Chunks of whole requests, into the emptiest of which go new keys of the others."""
    whole = [(r, r.seq_len) for r, w in zip(parts, is_whole, strict=True) if w]
    long = [r for r, w in zip(parts, is_whole, strict=True) if not w]
    filled = _filled(whole, num_tokens)
    if long:
        filled.sort(key=_num_keys, reverse=True)
        _append([(r, r.count) for r in long], filled, num_tokens)
    causal = [
        ChunkOfKeys(True, tuple(Keys(r, r.seq_len - count, count) for r, count in chunk))
        for chunk in filled
    ]
    order = tuple(r for chunk in filled for r, _ in chunk)
    return PrefillPlan(order, (*causal, *packed_chunks(long, num_tokens, page_size)))


def _split(rows: Rows, most: int) -> list[Rows]:
    """At most `most` rows each."""
    return [
        Rows(
            rows.request,
            rows.first + i,
            min(most, rows.count - i),
            rows.context + min(i + most, rows.count),
        )
        for i in range(0, rows.count, most)
    ]


Sized = tuple[Rows, int]
"""Rows, and how many keys of theirs are taken together."""


def _num_keys(group: list[Sized]) -> int:
    return sum(count for _, count in group)


def _append(sized: Sequence[Sized], groups: list[list[Sized]], room: int) -> None:
    """Fill the last group in their order, then further ones."""
    for item in sized:
        if not groups or _num_keys(groups[-1]) + item[1] > room:
            groups.append([])
        groups[-1].append(item)


def _filled(sized: Sequence[Sized], room: int) -> list[list[Sized]]:
    """Groups of at most `room` keys: in their order, or longest first where those are fewer."""
    in_order: list[list[Sized]] = []
    _append(sized, in_order, room)
    if len(in_order) <= 1:
        return in_order
    groups: list[list[Sized]] = []
    for item in sorted(sized, key=lambda pair: -pair[1]):
        fits = (g for g in groups if _num_keys(g) + item[1] <= room)
        group = next(fits, None)
        if group is None:
            groups.append(group := [])
        group.append(item)
    return groups if len(groups) < len(in_order) else in_order
