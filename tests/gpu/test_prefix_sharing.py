"""Shared prefixes on a GPU: captured and verified, without a wait of the host."""

# pyright: reportOptionalMemberAccess=false
import pytest
import torch

from attn_ops import AttentionSpec, PagedKVCache
from attn_ops.prefixes import block_keys
from graphs import DecodeSession
from graphs.step import shared
from tests.gpu import graph_cases as cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_replays_are_right(make_model, mode, decode_steps):
    """Groups of prompts twice: of the second round all but the last token of each is found."""
    model = cases.wide(make_model, "llama")
    session = DecodeSession(
        model, max_batch_size=8, max_tokens=160, max_tokens_per_step=64, cudagraph_mode=mode,
        decode_steps=decode_steps, verify="always", share_prefixes=True,
    )  # fmt: skip
    prompts = [[first] * 50 + list(range(1, last)) for first in (3, 4) for last in range(2, 12)]
    for _ in range(2):
        assert len(session.generate(prompts, 12)) == len(prompts)
    counts = session.report().prefixes
    assert counts.num_shared_tokens > 0.8 * counts.num_prompt_tokens
    assert session.verifier.num_checked > 0
    assert session.cache.num_free_blocks == session.cache.num_blocks - 1


@pytest.fixture
def small_prefixes_pay(monkeypatch):
    monkeypatch.setattr(shared, "LEAST_REQUESTS", 2)
    monkeypatch.setattr(shared, "LEAST_BYTES", 1)


@pytest.mark.parametrize("backend", ["AUTO", "TRITON", "FLASH_ATTN"])
@pytest.mark.usefixtures("small_prefixes_pay")
def test_a_prefix_is_attended_to_apart(make_model, backend):
    """In captured steps, whose batch and prefix change; every replay is compared with a call."""
    model = cases.compiled(cases.wide(make_model, "llama"))
    session = DecodeSession(
        model, max_batch_size=8, max_tokens=160, max_tokens_per_step=64, verify="always",
        backend=cases.available(backend), share_prefixes=True, capture_sizes=[1, 2, 4, 8],
    )  # fmt: skip
    for shared_len in (32, 50, 96):
        prompts = [[shared_len] * shared_len + list(range(1, last)) for last in range(2, 10)]
        for number in (5, 8):
            session.generate(prompts[:number], 20)
        session.generate(two_groups_and_others(shared_len), 20)
    apart = {captured.key: captured for captured in session.graphs or () if captured.key.groups}
    assert 8 in {key.num_reqs for key in apart}
    assert sum(captured.num_replays for captured in apart.values()) > 60
    assert session.verifier.num_checked == session.num_steps["captured"]
    assert session.counters.num_recompiles == 0
    assert session.cache.num_free_blocks == session.cache.num_blocks - 1


def two_groups_and_others(shared_len: int) -> list[list[int]]:
    """Of 8 prompts three begin alike, two share nothing, and three begin alike again."""
    one, two = ([token] * shared_len for token in (3, 9))
    rows = [one, one, one, [11, 12], [13] * 5, two, two, two]
    return [[*row, *range(20, 22 + i)] for i, row in enumerate(rows)]


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.usefixtures("small_prefixes_pay")
def test_a_prefix_apart_changes_no_token(make_model, decode_steps):
    """In float32."""
    model = cases.wide(make_model, "llama", dtype=torch.float32)
    options = {"max_batch_size": 8, "max_tokens": 160, "backend": "TRITON"}
    plain = DecodeSession(model, **options, cudagraph_mode="NONE")
    session = DecodeSession(model, **options, share_prefixes=True, decode_steps=decode_steps)
    for prompts in ([[5] * 40 + list(range(1, n)) for n in range(2, 9)], two_groups_and_others(48)):
        got, want = (cases.tokens(s.generate(prompts, 30)) for s in (session, plain))
        assert got == want
    assert any(captured.key.groups and captured.num_replays for captured in session.graphs or ())


@pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
def test_a_partial_block_is_copied_without_a_wait(cache_layout):
    spec = AttentionSpec(4, 2, 64, torch.bfloat16)
    cache = PagedKVCache([spec] * 3, num_tokens=64, device="cuda", cache_layout=cache_layout)
    tokens = list(range(20))
    keys = block_keys(tokens, 16)
    first = cache.reserve("a", 20)
    for tensor in cache.tensors:
        tensor[first[1]].normal_()
    cache.keep("a", tokens, keys)
    second = cache.reserve("b", 30, cache.match([*tokens, 7], block_keys([*tokens, 7], 16)))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.copy_partial()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (second[0], second[1] == first[1]) == (first[0], False)
    for tensor in cache.tensors:
        assert torch.equal(tensor[first[1]], tensor[second[1]])
