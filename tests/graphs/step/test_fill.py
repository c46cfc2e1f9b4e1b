"""A step's tensors are filled as they would be request by request, whatever they held before."""

import random

import numpy as np
import pytest
import torch

from attn_ops import AttentionSpec, PagedKVCache
from attn_ops.block_pool import NULL_BLOCK, BlockPool
from attn_ops.prefixes import NO_MATCH, Match
from benchmarks import host_step
from graphs.requests.batch import Rows, Scheduled
from graphs.requests.requests import Request
from graphs.sampling import SamplingParams
from graphs.step.blocks import BlockRows
from graphs.step.tensors import StepTensors

BLOCK, MOST, TOKENS, BLOCKS = 4, 6, 24, 12
SPEC = AttentionSpec(2, 1, 8, torch.float32)


def new_request(number: int, rng: random.Random) -> Request:
    prompt = [rng.randrange(60) for _ in range(rng.randrange(1, 20))]
    stops = frozenset(rng.sample(range(60), rng.randrange(12)))
    params = SamplingParams(temperature=rng.choice([0.0, 0.7]), top_k=rng.randrange(5), seed=number)
    request = Request(number, prompt, 9, params, frozenset(), stops, rng.choice([20, 40]))
    request.token_ids += [rng.randrange(60) for _ in range(rng.randrange(3))]
    return request


def scheduled(requests: list[Request], query_len: int | None, rng: random.Random) -> Rows:
    rows: list[Scheduled] = []
    left = TOKENS - 1
    for row, request in enumerate(requests):
        length = request.num_tokens
        if query_len is not None:
            draft = tuple(rng.randrange(60) for _ in range(query_len - 1))
            source = row if query_len == 1 and rng.random() < 0.5 else -1
            pending = source >= 0
            begin = length - 1 + pending
            rows.append(
                Scheduled(request, query_len, begin, length + pending, True, 0, source, draft)
            )
            continue
        begin = rng.randrange(length)
        chunk = min(length - begin, rng.randrange(1, 6), left - len(requests) + row + 1)
        left -= chunk
        rows.append(Scheduled(request, chunk, begin, length, begin + chunk == length, 0))
    return Rows(rows)


@pytest.mark.parametrize("query_len", [1, 3, None])
@pytest.mark.parametrize("seed", range(3))
def test_as_request_by_request(query_len, seed):
    """Requests come, grow, leave and change places."""
    rng = random.Random(seed)
    cache = PagedKVCache([SPEC], num_tokens=400, block_size=BLOCK)
    blocks = BlockRows(cache.pool, BLOCKS, 3)  # it grows
    num_tokens = TOKENS if query_len is None else MOST * query_len
    device = torch.device("cpu")
    tensors, want = (
        StepTensors.allocate(num_tokens, MOST, BLOCKS, device, query_len=query_len)
        for _ in range(2)
    )
    running: list[Request] = []
    for number in range(60):
        while len(running) < MOST - 1 and rng.random() < 0.6:
            request = new_request(number * 10 + len(running), rng)
            cache.reserve(request.id, request.num_tokens + 2)
            running.append(request)
        if rng.random() < 0.4 and len(running) > 1:
            cache.free(running.pop(rng.randrange(len(running))).id)
        for request in rng.sample(running, len(running) // 2):
            cache.reserve(request.id, min(request.num_tokens + 9, BLOCKS * BLOCK))
        if not running:
            continue
        rng.shuffle(running)
        step = scheduled(running, query_len, rng)
        rows = blocks.find([request.id for request in step.requests])
        tensors.fill(step, [(blocks, rows)], BLOCK)
        tables = [cache.blocks(s.request.id) for s in step]
        host_step.fill_by_rows(want, step, tables, BLOCK)
        if query_len == 1:  # the device writes those that it has
            taken = [row for row, s in enumerate(step) if s.source >= 0]
            tensors.arrays["input_ids"][0, taken] = 0
        for name, array in want.arrays.items():
            assert np.array_equal(tensors.arrays[name], array), (number, name)


def test_a_row_is_written_when_its_table_changes():
    cache = PagedKVCache([SPEC], num_tokens=64, block_size=BLOCK)
    blocks = BlockRows(cache.pool, BLOCKS, 2)
    cache.reserve("a", 9)
    (row,) = blocks.find(["a"])
    assert blocks.blocks[row].tolist() == [*cache.blocks("a"), *[0] * (BLOCKS - 3)]
    before = blocks.versions[row]
    assert blocks.find(["a"]).tolist() == [row]
    assert blocks.versions[row] == before
    cache.reserve("a", 13)
    blocks.find(["a"])
    assert blocks.versions[row] > before
    assert blocks.num_blocks[row] == 4
    cache.free("a")
    for request in "bcdef":
        cache.reserve(request, 5)
    rows = blocks.find(list("bcdef"))
    assert len(set(rows.tolist())) == 5
    for at, request in zip(rows, "bcdef", strict=True):
        assert blocks.blocks[at].tolist() == [*cache.blocks(request), *[0] * (BLOCKS - 2)]


def test_blocks_given_back_are_named_by_the_first_that_is_left():
    cache = PagedKVCache([SPEC], num_tokens=64, block_size=BLOCK)
    blocks = BlockRows(cache.pool, BLOCKS, 1)
    owned = list(cache.reserve("a", 3 * BLOCK))
    cache.release("a", 2)
    (row,) = blocks.find(["a"])
    assert blocks.blocks[row].tolist()[:4] == [owned[2]] * 3 + [0]


def test_the_benchmark_runs(capsys):
    host_step.main(["--batches", "2", "--context", "40", "--rounds", "2"])
    assert "schedule + moved" in capsys.readouterr().out


def test_blocks_that_a_request_never_took_are_named_by_the_first_it_has():
    """Those of a prefix that lie behind the window of the layers."""
    pool = BlockPool(9, BLOCK)
    (kept,) = pool.reserve("a", BLOCK, NO_MATCH)
    blocks = BlockRows(pool, BLOCKS, 1)
    pool.reserve("b", 3 * BLOCK, Match((NULL_BLOCK, kept), 2 * BLOCK))
    (row,) = blocks.find(["b"])
    last = pool.tables["b"].blocks[2]
    assert blocks.blocks[row].tolist()[:4] == [kept, kept, last, 0]


def test_captured_padding_is_valid_and_has_no_tokens():
    step = StepTensors.allocate(4, 4, 2, torch.device("cpu"), query_len=1)
    step.upload()
    common = step.common(1, 8)
    common.validate(block_size=4)
    assert common.num_computed_tokens.tolist() == [0] * 4
    assert common.num_computed_tokens_cpu.tolist() == [0] * 4
    common.slot_mapping[2] = 5
    with pytest.raises(ValueError, match=r"slot_mapping must be -1 for requests .*\[2\]=5"):
        common.validate(block_size=4)
