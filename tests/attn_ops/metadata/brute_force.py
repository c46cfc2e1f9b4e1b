"""What the metadata of a batch must be: plain lists, one token and one request at a time.

Derived from the definitions and from nothing else: a batch is a list of requests; a request with
q query tokens and n tokens in all has its queries at positions n - q to n - 1; rows of the batch
are those tokens one after the other; slot = block * block_size + offset of the position in it.
No numpy and no torch here, and nothing from attn_ops.
"""

import functools
from collections.abc import Sequence

PAD = -1
Table = Sequence[Sequence[int]]  # block ids of each request


def starts(query_lens: Sequence[int]) -> list[int]:
    """First row of every request, and the number of rows."""
    first = [0]
    for query in query_lens:
        first.append(first[-1] + query)
    return first


def tokens(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[tuple[int, int]]:
    """(request, position) of every row."""
    return [
        (request, position)
        for request, (query, seq) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(seq - query, seq)
    ]


def slot(blocks: Sequence[int], position: int, block_size: int) -> int:
    """PAD where the request owns no block for the position."""
    if position >= len(blocks) * block_size:
        return PAD
    return blocks[position // block_size] * block_size + position % block_size


def positions_and_slots(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: Table,
    block_size: int,
    num_rows: int,
) -> tuple[list[int], list[int]]:
    """Of every row; padding rows have position 0 and slot PAD."""
    positions, slots = [], []
    for request, position in tokens(query_lens, seq_lens):
        positions.append(position)
        slots.append(slot(table[request], position, block_size))
    missing = num_rows - len(positions)
    return positions + [0] * missing, slots + [PAD] * missing


def advance(
    state: dict[str, list[int]],
    sampled: Sequence[int],
    table: Table,
    block_size: int,
    active: Sequence[bool] | None,
) -> dict[str, list[int]]:
    """One decode step later: input_tokens, positions, seq_lens, slot_mapping of every request."""
    new = {name: list(values) for name, values in state.items()}
    for i, length in enumerate(state["seq_lens"]):
        is_padding = length == 0
        is_full = length + 1 > len(table[i]) * block_size
        if is_padding or is_full or (active is not None and not active[i]):
            new["slot_mapping"][i] = PAD
            continue
        new["input_tokens"][i] = sampled[i]
        new["positions"][i] = length  # positions count from 0
        new["slot_mapping"][i] = slot(table[i], length, block_size)
        new["seq_lens"][i] = length + 1
    return new


def pages(
    seq_lens: Sequence[int], table: Table, block_size: int
) -> tuple[list[int], list[int], list[int]]:
    """FlashInfer's indptr, indices and last_page_len, page by page."""
    indptr, indices, last_page_len = [0], [], []
    for length, blocks in zip(seq_lens, table, strict=True):
        held = 0
        for first in range(0, length, block_size):
            indices.append(blocks[first // block_size])
            held = min(block_size, length - first)
        indptr.append(len(indices))
        last_page_len.append(held)
    return indptr, indices, last_page_len


def split_decodes(
    query_lens: Sequence[int],
    num_tokens: int,
    max_query_len: int,
    threshold: int,
    require_uniform: bool,
) -> tuple[int, int, int, int]:
    """Decodes are the leading requests of at most `threshold` tokens, of one length if uniform.

    The whole batch is decodes, padding rows included, where `max_query_len` already says so, where
    no request ends the leading run, and for a uniform batch whose empty requests are padding: its
    rows are padded to the same length for every request.
    """
    num_reqs = len(query_lens)
    everything = (num_reqs, 0, num_tokens, 0)
    if num_reqs == 0:
        return everything
    if max_query_len <= threshold and (not require_uniform or threshold <= 1):
        return everything
    first = query_lens[0]
    padded = num_tokens == num_reqs * first
    if require_uniform and first <= threshold and padded and set(query_lens) <= {0, first}:
        return everything
    for num_decodes, query in enumerate(query_lens):
        if query > threshold or (require_uniform and query != first):
            num_decode_tokens = sum(query_lens[:num_decodes])
            prefills = num_reqs - num_decodes
            return num_decodes, prefills, num_decode_tokens, num_tokens - num_decode_tokens
    return everything


def decode_first_swaps(query_lens: Sequence[int], threshold: int) -> list[tuple[int, int]]:
    """The fewest swaps that bring decodes to the front: (prefill index, decode index).

    Every decode behind the first num_decodes places must move and one swap moves one of them; it
    takes the place of a prefill before. Prefills ascend, decodes descend.
    """
    num_decodes = sum(query <= threshold for query in query_lens)
    decodes = [i for i, q in enumerate(query_lens) if q <= threshold and i >= num_decodes]
    prefills = [i for i, q in enumerate(query_lens) if q > threshold and i < num_decodes]
    return list(zip(prefills, reversed(decodes), strict=True))


def ubatch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    requests: range,
    rows: range,
) -> dict[str, list[int]]:
    """query_lens, seq_lens and num_computed of `requests` if only the tokens in `rows` exist."""
    kept: dict[int, list[int]] = {request: [] for request in requests}
    for row, (request, position) in enumerate(tokens(query_lens, seq_lens)):
        if row in rows and request in kept:
            kept[request].append(position)
    query, seq, computed = [], [], []
    for request, positions in kept.items():
        query.append(len(positions))
        seq.append(positions[-1] + 1 if positions else seq_lens[request])
        computed.append(positions[0] if positions else seq_lens[request])
    return {"query_lens": query, "seq_lens": seq, "num_computed": computed}


def virtual_batches(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: Table,
    chunk: int,
    block_size: int,
) -> list[tuple[int, int, list[int]]]:
    """(query length, key length, blocks) of every group of queries that share a chunk.

    The token at position p attends the keys p // chunk * chunk to p. A request without queries
    gives one group: that of its last token. Blocks behind the request's table repeat its last.
    """
    result = []
    for query, seq, blocks in zip(query_lens, seq_lens, table, strict=True):
        groups: dict[int, list[int]] = {}
        for position in range(seq - query, seq):
            groups.setdefault(position // chunk, []).append(position)
        last_token = max(seq - 1, 0)
        for group, members in (groups or {last_token // chunk: []}).items():
            first_key = group * chunk
            end = members[-1] + 1 if members else seq
            columns = [(first_key + k) // block_size for k in range(0, chunk, block_size)]
            owned = [blocks[min(column, len(blocks) - 1)] for column in columns]
            result.append((len(members), end - first_key, owned))
    return result


def chunk_key_slots(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: Table,
    chunk: int,
    block_size: int,
) -> list[list[int]]:
    """Slots that every row attends under chunked local attention."""
    return [
        [slot(table[r], key, block_size) for key in range(position // chunk * chunk, position + 1)]
        for r, position in tokens(query_lens, seq_lens)
    ]


def causal_key_slots(
    query_lens: Sequence[int], seq_lens: Sequence[int], table: Table, block_size: int
) -> list[list[int]]:
    """Slots that every row attends under causal attention."""
    return [
        [slot(table[r], key, block_size) for key in range(position + 1)]
        for r, position in tokens(query_lens, seq_lens)
    ]


@functools.cache
def _most_chunks(query: int, chunk: int) -> int:
    """Most chunks that `query` consecutive positions can touch, at least 1."""
    return max(1, *(len({(s + i) // chunk for i in range(query)}) for s in range(chunk)))


@functools.cache
def most_virtual_batches(
    chunk: int, num_reqs: int, num_tokens: int, max_query_len: int | None
) -> int:
    """Over every way to deal at most `num_tokens` to `num_reqs` requests."""
    if num_reqs == 0:
        return 0
    longest = num_tokens if max_query_len is None else min(num_tokens, max_query_len)
    return max(
        _most_chunks(query, chunk)
        + most_virtual_batches(chunk, num_reqs - 1, num_tokens - query, max_query_len)
        for query in range(longest + 1)
    )


def queries_with_logits(query_lens: Sequence[int], rows: Sequence[int]) -> list[int]:
    """How many of `rows` each request owns."""
    counts = []
    first = 0
    for query in query_lens:
        counts.append(sum(first <= row < first + query for row in rows))
        first += query
    return counts


def conv1d_chunks(query_lens: Sequence[int], chunk: int) -> tuple[list[int], list[int]]:
    """(request, index within it) of every chunk of `chunk` tokens, the last one partial."""
    requests, offsets = [], []
    for request, query in enumerate(query_lens):
        for offset, _ in enumerate(range(0, query, chunk)):
            requests.append(request)
            offsets.append(offset)
    return requests, offsets
