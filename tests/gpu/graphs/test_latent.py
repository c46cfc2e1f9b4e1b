"""Captured sessions of models with latent attention: every replay right, faults caught.

Sizes of a layer are DeepSeek's, which the libraries' kernels take; experts are few. A test takes 5
to 40 s on one H200 (predicted).
"""

from typing import Any

import pytest
import torch

from attn_ops import get_backend
from attn_ops.backends import registry
from graphs import BatchDescriptor, CUDAGraphMode, DecodeSession
from graphs.capture.verifier import VerificationError
from graphs.sampling.params import Sampling
from tests.gpu import graph_cases as cases
from tests.gpu.graph_cases import PROMPTS, tokens

pytestmark = pytest.mark.gpu

LATENT: dict[str, Any] = cases.LATENT | {"num_layers": 3}
DENSE: dict[str, Any] = LATENT | {"first_k_dense_replace": 3, "dtype": torch.float32}
"""No experts: in float32 those of Transformers read numbers from the GPU."""

WHOLE = ["TRITON_MLA", "FLASH_ATTN_MLA", "AUTO_MLA"]
"""Backends whose decodes are captured whole."""


def small(model, **options) -> DecodeSession:
    return cases.small(model, **({"backend": "TRITON_MLA"} | options))


def uncaptured(model, **options) -> list[list[int]]:
    return tokens(small(model, cudagraph_mode="NONE", **options).generate(PROMPTS, 16))


@pytest.fixture
def dense(make_model):
    return cases.wide(make_model, "deepseek_v3", **DENSE)


# -- every replay is right -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("backend", [*WHOLE, "FLASHINFER_MLA"])
def test_500_random_steps_verified(make_model, backend, family):
    """Prompts in chunks, all kinds of sampling, a cache that makes requests wait; with experts."""
    backend = cases.available(backend)
    model = cases.compiled(cases.wide(make_model, family, **LATENT))
    session = DecodeSession(
        model, max_batch_size=8, max_tokens=160, max_tokens_per_step=64, cache_tokens=800,
        backend=backend, capture_sizes=[1, 2, 4, 8], verify="always",
        cudagraph_mode="FULL_DECODE_ONLY" if backend in WHOLE else "PIECEWISE",
    )  # fmt: skip
    session.warm_up()
    num_compiled, visitors = cases.num_compiled(), cases.Visitors(session)
    while session.num_steps["captured"] < 500:
        visitors.step()
    visitors.drain()
    assert session.verifier is not None
    assert session.verifier.num_checked == session.num_steps["captured"] >= 500
    assert cases.num_compiled() == num_compiled, "nothing is compiled behind the warm-up"
    counters = session.counters
    assert (counters.num_graphs, counters.num_breaks, counters.num_recompiles) == (1, 0, 0)
    decodes = [captured for captured in session.graphs or () if captured.key.uniform]
    assert {captured.key.num_reqs for captured in decodes} == {1, 2, 4, 8}
    whole = CUDAGraphMode.FULL if backend in WHOLE else CUDAGraphMode.PIECEWISE
    assert {captured.mode for captured in decodes} == {whole}


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_caches_verified(make_model, kv_cache_dtype):
    model = cases.compiled(cases.wide(make_model, "deepseek_v3", **LATENT))
    session = small(model, kv_cache_dtype=kv_cache_dtype, verify="always")
    for seed in range(3):
        prompts = [[seed + 1, *prompt] for prompt in PROMPTS]
        session.generate(prompts, 40)
    assert session.verifier is not None
    assert session.verifier.num_checked == session.num_steps["captured"] > 50
    assert {cache.dtype for cache in session.cache.tensors} == {torch.uint8}


@pytest.mark.parametrize("is_compiled", [False, True])
def test_steps_in_a_row_give_the_same_tokens(dense, is_compiled):
    """In float32, 1, 4 and 8 of them."""
    want = uncaptured(dense)
    assert len({token for row in want for token in row}) > 20
    model = cases.compiled(dense) if is_compiled else dense
    for decode_steps in (1, 4, 8):
        session = small(model, decode_steps=decode_steps, verify="always")
        assert tokens(session.generate(PROMPTS, 16)) == want, decode_steps
        assert session.num_steps["captured"] > 20
        assert session.counters.num_recompiles == 0


@pytest.mark.parametrize("backend", WHOLE)
def test_backends_agree(make_model, backend):
    """In bfloat16 some tokens fall another way, and those behind them."""
    dense: dict[str, Any] = DENSE | {"dtype": torch.bfloat16}
    model = cases.wide(make_model, "deepseek_v2", **dense)
    want = uncaptured(model)
    session = small(model, backend=cases.available(backend))
    got = tokens(session.generate(PROMPTS, 16))
    same = [a == b for rows in zip(got, want, strict=True) for a, b in zip(*rows, strict=True)]
    assert sum(same) > 0.5 * len(same)
    assert [row[0] for row in got] == [row[0] for row in want]


def test_drafts_change_nothing(dense):
    """Right, partly right and wrong drafts, in graphs of four rows a request."""
    want = uncaptured(dense)
    session = small(dense, num_draft_tokens=3, verify="always")
    ids = [session.add(prompt, 16) for prompt in PROMPTS]
    generator = torch.Generator().manual_seed(1)
    known = dict.fromkeys(ids, 0)
    while session.num_unfinished:
        drafts = {}
        for request, row in zip(ids, want, strict=True):
            draft = row[known[request] : known[request] + 3]
            kind = int(torch.randint(0, 4, (), generator=generator))
            if kind == 0:
                draft = [(token + 1) % cases.VOCAB for token in draft]
            drafts[request] = draft[:1] if kind == 1 else draft
        for output in session.verify_draft(drafts):
            known[output.request_id] += 1
    assert [session.result(request).token_ids for request in ids] == want  # pyright: ignore
    drafted = BatchDescriptor(16, 4, uniform=True, sampling=Sampling.GREEDY)
    assert {c.key: c.num_replays for c in session.graphs or ()}[drafted] > 2


def test_weights_written_in_place_are_followed(dense):
    """Graphs read `kv_b_proj` where it lies."""
    session = small(dense)
    before = tokens(session.generate(PROMPTS, 16))
    for layer in dense.model.layers:
        layer.self_attn.kv_b_proj.weight.mul_(-1)
    want = uncaptured(dense)
    assert tokens(session.generate(PROMPTS, 16)) == want != before


def test_a_long_context_in_chunks(make_model):
    """Prompts of which every chunk sees the ones before it; replays behind them are verified."""
    model = cases.wide(make_model, "deepseek_v3", **LATENT)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1500, 3, 700)]
    sizes = {"max_tokens": 1600, "verify": "always"}
    found = [
        tokens(small(model, max_tokens_per_step=step, **sizes).generate(prompts, 8))
        for step in (2048, 128)
    ]
    assert sum(a[0] == b[0] for a, b in zip(*found, strict=True)) >= 2, "of three, in bfloat16"


def test_the_default_backend_is_for_latents(make_model):
    session = cases.small(cases.wide(make_model, "deepseek_v2", **LATENT), backend=None)
    assert session.backend_selection.backend.support.latent
    assert session.graph_mode is CUDAGraphMode.FULL_DECODE_ONLY, session.graph_mode_why


# -- faults ----------------------------------------------------------------------------------------

REFUSED = "must stay where they were, got .*"


def moved_kv_b(session: DecodeSession) -> cases.Undo:
    weight = session.original.model.layers[1].self_attn.kv_b_proj.weight
    old = weight.data
    weight.data = old.clone()
    return lambda: setattr(weight, "data", old)


MOVES = cases.MOVES | {r"weights\.model\.layers\.1\.self_attn\.kv_b_proj\.weight": moved_kv_b}


@pytest.mark.parametrize("decode_steps", [1, 8])
@pytest.mark.parametrize("named", MOVES)
def test_moved_tensor_is_refused_and_the_session_goes_on(dense, named, decode_steps):
    session = small(dense, decode_steps=decode_steps)
    ids = [session.add(prompt, 40) for prompt in PROMPTS[:2]]
    for _ in range(3):
        session.step()
    undo = MOVES[named](session)
    try:
        with pytest.raises(ValueError, match=REFUSED + named):
            session.step()
    finally:
        undo()
    while session.num_unfinished:
        session.step()
    want = tokens(small(dense, cudagraph_mode="NONE").generate(PROMPTS[:2], 40))
    assert [session.result(request).token_ids for request in ids] == want  # pyright: ignore


@pytest.mark.parametrize("verify", ["always", "first"])
def test_frozen_length_is_caught(dense, monkeypatch, tmp_path, verify):
    """A backend that freezes in the graph what it last saw of the lengths."""
    frozen = cases.frozen_backend(get_backend("TRITON_MLA"), "FROZEN")
    monkeypatch.setattr(registry, "_registered", registry._registered | {"FROZEN": frozen})
    options: dict[str, Any] = {"backend": "FROZEN", "lazy_capture": True}
    unnoticed = small(dense, **options)
    assert tokens(unnoticed.generate(PROMPTS, 16)) != uncaptured(dense), "nobody looked"
    session = small(dense, verify=verify, **options)
    assert session.verifier is not None
    session.verifier.directory = tmp_path
    with pytest.raises(VerificationError, match="replay of BatchDescriptor") as caught:
        session.generate(PROMPTS, 16)
    assert caught.value.tensor.startswith("kv_caches[1]"), caught.value
    assert 0.0 < caught.value.difference < float("inf")
