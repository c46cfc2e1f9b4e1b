"""Sessions on a GPU whose requests grow out of the cache, and whose layers have windows."""

# pyright: reportOptionalMemberAccess=false
import pytest
import torch

from graphs import DecodeSession, cache_size
from tests.fuzz.sessions import results_alone, run_session
from tests.gpu import graph_cases as cases
from tests.kit.sessions import is_empty

pytestmark = pytest.mark.gpu

MODES = ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE", "NONE"]
PROMPTS = [[i + 1] * (1 + 17 * i % 90) for i in range(16)]
SIZES = {"max_batch_size": 8, "max_tokens": 256, "max_tokens_per_step": 64}


@pytest.fixture(scope="module")
def model(make_model):
    return cases.wide(make_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def windowed(make_model):
    return cases.wide(make_model, "mistral", dtype=torch.float32, sliding_window=40)


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_a_cache_of_half_the_size(model, mode, decode_steps):
    options = {"backend": "TRITON", **SIZES}
    want = DecodeSession(model, cudagraph_mode="NONE", **options).generate(PROMPTS, 60)
    session = DecodeSession(
        model, cudagraph_mode=mode, decode_steps=decode_steps, cache_tokens=512, **options
    )
    assert session.generate(PROMPTS, 60) == want
    assert session.report().preemptions.num_preemptions > 0
    assert session.cache.num_free_blocks == session.cache.num_blocks - 1


@pytest.mark.parametrize("mode", MODES)
def test_windows(windowed, mode):
    """Blocks hold large numbers where nothing is written. Kernels may load but not count them."""
    options = {"backend": "TRITON", **SIZES}
    want = DecodeSession(windowed, cudagraph_mode="NONE", max_batch_size=1, max_tokens=256,
                         backend="TRITON").generate(PROMPTS, 60)  # fmt: skip
    session = DecodeSession(windowed, cudagraph_mode=mode, cache_tokens=600, **options)
    assert session.cache.window == 40
    for tensor in session.cache.tensors:
        tensor[1:] = 1000.0
    assert session.generate(PROMPTS, 60) == want
    assert session.cache.num_free_blocks == session.cache.num_blocks - 1


@pytest.mark.parametrize("backend", ["TRITON", "FLASH_ATTN", "FLASHINFER", "AUTO"])
def test_windows_of_backends_verified(make_model, backend):
    model = cases.wide(make_model, "mistral", sliding_window=40)
    options = {"backend": backend, "cache_tokens": 600} | SIZES
    session = DecodeSession(model, None, verify="always", **options)
    results = session.generate(PROMPTS, 40)
    assert [len(r.token_ids) for r in results] == [40] * len(PROMPTS)
    assert session.verifier.num_checked > 0


@pytest.mark.parametrize("mode", MODES)
def test_own_blocks(make_model, mode, monkeypatch):
    """Layers with a window beside others: few blocks, the same tokens, nothing else read."""
    monkeypatch.setattr(cache_size, "STRIDE", 16)
    model = cases.wide(make_model, "gemma2", dtype=torch.float32, sliding_window=40)
    options = {"backend": "TRITON", **SIZES, "max_tokens_per_step": 16}
    kinds = [{}, {"temperature": 1.0, "seed": 3}]
    alone = DecodeSession(model, cudagraph_mode="NONE", reserve="length", **options)
    want = [alone.generate(PROMPTS, 60, **kind) for kind in kinds]
    for decode_steps in (1, 4):
        session = DecodeSession(model, cudagraph_mode=mode, decode_steps=decode_steps, **options)
        assert session.cache.window_blocks < session.cache.num_blocks
        for tensor in session.cache.tensors:
            tensor[1:] = 1000.0
        assert [session.generate(PROMPTS, 60, **kind) for kind in kinds] == want
        assert is_empty(session)


@pytest.mark.parametrize("family", ["gemma2", "gemma3n", "gemma4"])
@pytest.mark.parametrize("backend", ["TRITON", "FLASH_ATTN", "AUTO"])
def test_own_blocks_of_backends_verified(make_model, backend, family, monkeypatch):
    monkeypatch.setattr(cache_size, "STRIDE", 16)
    model = cases.compiled(cases.wide(make_model, family, sliding_window=40))
    options = SIZES | {"max_tokens_per_step": 16, "backend": backend, "decode_steps": 4}
    session = DecodeSession(model, verify="always", **options)
    assert session.cache.window_blocks
    results = session.generate(PROMPTS, 40)
    assert [len(r.token_ids) for r in results] == [40] * len(PROMPTS)
    assert session.verifier.num_checked > 0
    assert session.counters.num_recompiles == 0


@pytest.mark.parametrize("which", ["model", "windowed"])
def test_random_sessions(request, which):
    model = request.getfixturevalue(which)
    changes = {"block_size": 16, "backend": "TRITON"}
    alone = results_alone(model, **changes)
    for seed in range(40):
        tight = [48, 64, 96][seed % 3]
        run_session(model, alone, 50_000 + seed, debug=None, cache_tokens=tight, **changes)
