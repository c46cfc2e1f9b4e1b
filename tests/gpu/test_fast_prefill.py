"""Fast prefill on a GPU: attention for logits rows on every backend, sessions with the pass on.

T rows of the batch, R logits rows.
"""

import pytest
import torch

import fx_passes
from attn_ops import AttentionSpec, CommonAttentionMetadata, PagedKVCache, attention, get_backend
from graphs import DecodeSession
from tests.gpu import graph_cases as cases

pytestmark = pytest.mark.gpu

BACKENDS = ["TRITON", "FLASH_ATTN", "FLASHINFER", "XFORMERS", "FLEX", "TORCH", "AUTO"]


def with_logits_rows(common, counts):
    """The batch, with the last `counts` rows of each request as logits rows."""
    ends = common.query_start_loc_cpu[1:].tolist()
    rows = [row for end, n in zip(ends, counts, strict=True) for row in range(end - n, end)]
    rows_cpu = torch.tensor(rows, dtype=torch.int64)
    return common.replace(
        logits_indices_padded=rows_cpu.to(common.device), logits_indices_cpu=rows_cpu,
        num_logits_indices=len(rows), max_logits_per_req=max(counts),
    )  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [None, 40])
def test_attention_for_logits_rows_is_a_part_of_all(name, window):
    """Chunks of prompts, decodes and several logits rows a request, over poisoned caches."""
    backend = get_backend(cases.available(name))
    spec = AttentionSpec(8, 2, 64, torch.bfloat16, sliding_window=window)
    if reasons := backend.reasons_against(spec, 16, torch.device("cuda")):
        pytest.skip("; ".join(reasons))
    builder = backend.builder(backend, [spec], 16, "cuda")
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        num_reqs = int(torch.randint(1, 7, (), generator=generator))
        query = torch.randint(1, 90, (num_reqs,), generator=generator).tolist()
        query[0] = 1 if len(query) > 1 else 50
        keys = [n + int(torch.randint(0, 200, (), generator=generator)) for n in query]
        cache = PagedKVCache([spec], num_tokens=4096, block_size=16, device="cuda")
        cache.tensors[0].fill_(float("nan"))
        for request, n in enumerate(keys):
            cache.reserve(request, n)
            blocks = torch.tensor(cache.blocks(request), device="cuda")
            flat = torch.randn(len(blocks), 2, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
            flat.transpose(1, 2).flatten(0, 1)[n:] = float("nan")
            cache.tensors[0][blocks] = flat
        common = CommonAttentionMetadata.from_lengths(
            query, keys, cache.block_table(range(num_reqs)), 16, "cuda"
        )
        common = with_logits_rows(common, [min(n, 1 + i % 3) for i, n in enumerate(query)])
        meta = builder.build(0, common)
        q_TNH = torch.randn(sum(query), 8, 64, dtype=torch.bfloat16, device="cuda")
        options = {"sliding_window": window}
        whole = attention(q_TNH, cache.tensors[0], meta, 0.125, **options)
        rows = common.logits_indices_padded
        part = attention(q_TNH[rows], cache.tensors[0], meta, 0.125, logits_rows=True, **options)
        torch.testing.assert_close(part, whole[rows], rtol=2e-2, atol=2e-2)


def compiled(model, fast_prefill):
    torch._dynamo.reset()
    options = {"fast_prefill": fast_prefill}
    return torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True, options=options)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL", "PIECEWISE"])
def test_sessions_give_the_same_tokens(make_model, family, mode):
    """In float32, with mixed steps captured where the mode does; the replays are verified."""
    model = cases.wide(make_model, family, dtype=torch.float32)
    want, long = cases.uncaptured(model), [list(range(1, 101))]
    want_long = cases.uncaptured(model, long, 8)
    fast = compiled(model, "on")
    options = {"cudagraph_mode": mode, "mixed_capture_sizes": [16, 32]}
    for more in ({}, {"verify": "always"}):
        session = cases.small(fast, **options, **more)
        assert cases.tokens(session.generate(cases.PROMPTS, 16)) == want
        assert cases.tokens(session.generate(long, 8)) == want_long
        assert session.counters.num_recompiles == 0
    if mode != "FULL_DECODE_ONLY":  # three chunks of 32 tokens want no logits
        (chunks,) = (one for one in session.graphs if not one.key.logits)
        assert chunks.num_replays == 3
        assert session.num_steps["called"] == 0


@pytest.mark.parametrize("size", [1, 32])
def test_mixed_steps_of_one_token_are_recorded(make_model, size):
    """Their padding is one row of one request, and no logits row."""
    model = cases.wide(make_model, dtype=torch.float32)
    session = cases.small(
        compiled(model, "on"), cudagraph_mode="PIECEWISE", mixed_capture_sizes=sorted({1, size}),
        max_tokens_per_step=size, verify="always",
    )  # fmt: skip
    assert cases.tokens(session.generate(cases.PROMPTS, 16)) == cases.uncaptured(model)
    assert session.num_steps["called"] == 0
    assert session.counters.num_recompiles == 0


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_models_that_share_caches_are_captured_whole(make_model, family):
    """Gemma 3n's numbers of the host are made on the device: no capture can copy them."""
    sizes = {"global_head_dim": 128} if family == "gemma4" else {}
    model = cases.wide(
        make_model, family, dtype=torch.float32, sliding_window=40, tie_word_embeddings=False,
        vocab_size_per_layer_input=cases.VOCAB, **sizes,
    )  # fmt: skip
    want, long = cases.uncaptured(model), [list(range(1, 101))]
    want_long = cases.uncaptured(model, long, 8)
    assert len({token for row in want for token in row}) > 5
    for mode in ("off", "on"):
        fast, before = compiled(model, mode), cases.num_compiled()
        session = cases.small(
            fast, cudagraph_mode="FULL", mixed_capture_sizes=[16, 32],
            verify="always",
        )  # fmt: skip
        assert cases.tokens(session.generate(cases.PROMPTS, 16)) == want
        assert cases.tokens(session.generate(long, 8)) == want_long
        assert session.num_steps["called"] == 0
        assert session.counters.num_recompiles == 0
        assert cases.num_compiled() - before == 1


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "AUTO"])
def test_sessions_of_other_backends(make_model, backend):
    """In bf16 nearly all tokens are those of the unrewritten model."""
    model = cases.wide(make_model)
    options = {"backend": cases.available(backend), "cudagraph_mode": "FULL_DECODE_ONLY"}
    results = []
    for mode in ("off", "on"):
        session = DecodeSession(compiled(model, mode), **(cases.SMALL | options))
        results.append(cases.tokens(session.generate(cases.PROMPTS, 16)))
    pairs = [pair for a, b in zip(*results, strict=True) for pair in zip(a, b, strict=True)]
    assert sum(a == b for a, b in pairs) >= 0.9 * len(pairs)
