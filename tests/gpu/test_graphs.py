"""Captured sessions on a GPU: every replay right, in every mode, and nothing grows.

Seconds in docstrings are predictions for one H200 where compiled code is in its caches; FlashInfer
compiles its sampling kernels once, in the first test that filters, in about a minute more. What is
caught, and captures that fail: test_graph_faults.py.
"""

import dataclasses
import gc
import itertools
from typing import Any

import pytest
import torch

from attn_ops import grouped_backend
from graphs import BatchDescriptor, CUDAGraphMode, DecodeSession
from graphs.capture.piecewise import PiecewiseGraph
from graphs.capture.store import CapturedStep
from graphs.capture.verified import VerifiedReplay
from graphs.modes import default_mixed_sizes
from graphs.sampling.params import Sampling
from tests.gpu import graph_cases as cases
from tests.gpu.graph_cases import PROMPTS, small, tokens

pytestmark = pytest.mark.gpu

MIB = 1 << 20


# -- every replay is right -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("backend", [None, "TRITON"])
def test_short_prompts_are_captured_by_default(make_model, backend, family):
    """Those are replayed that gain; a request alone draws the same in float32. 40 s each."""
    model = cases.compiled(cases.wide(make_model, family, dtype=torch.float32))
    sizes: dict[str, Any] = {"max_batch_size": 8, "max_tokens": 640, "backend": backend}
    session = DecodeSession(model, **sizes)
    session.warm_up()
    assert session.graph_mode is CUDAGraphMode.FULL
    assert max(gain.num_tokens for gain in session.loop.gains) == default_mixed_sizes(2048)[-1]
    prompts = [[i + 3] * n for i, n in enumerate([1, 16, 17, 60, 64, 200, 511, 512, 600])]
    want = tokens(DecodeSession(model, cudagraph_mode="NONE", **sizes).generate(prompts, 24))
    for prompt, alone in zip(prompts, want, strict=True):
        assert tokens(session.generate([prompt], 24)) == [alone], len(prompt)
    assert tokens(session.generate(prompts, 24)) == want
    assert any(c.num_replays for c in session.graphs or () if not c.key.uniform)
    assert session.counters.num_recompiles == 0


@pytest.mark.parametrize(("family", "mode"), [("llama", "FULL"), ("gemma2", "FULL_AND_PIECEWISE")])
@pytest.mark.parametrize("backend", ["TRITON", "FLASH_ATTN", "FLASHINFER"])
def test_1000_random_steps_verified(make_model, backend, family, mode):
    """Prompts in chunks, all kinds of sampling, a cache that makes requests wait. 30 s each."""
    backend = cases.available(backend)
    session = DecodeSession(
        cases.compiled(cases.wide(make_model, family)), max_batch_size=8, max_tokens=160,
        max_tokens_per_step=64, cache_tokens=800, backend=backend, cudagraph_mode=mode,
        capture_sizes=[1, 2, 4, 8], verify="always",
    )  # fmt: skip
    session.warm_up()
    num_compiled, visitors = cases.num_compiled(), cases.Visitors(session)
    while session.num_steps["captured"] < 1000:
        visitors.step()
    visitors.drain()
    for kind in cases.KINDS:  # a step is of its requests' strongest kind: RANDOM is rare among all
        alone = cases.Visitors(session, kinds=[kind])
        for _ in range(20):
            alone.step()
        alone.drain()
    verifier, graphs = session.verifier, session.graphs
    assert verifier is not None
    assert graphs is not None
    assert session.num_steps["called"] == 0
    assert verifier.num_checked == session.num_steps["captured"] >= 1000
    assert sum(captured.num_replays for captured in graphs) == verifier.num_checked
    assert verifier.num_forgiven < 0.1 * visitors.num_tokens
    assert cases.num_compiled() == num_compiled, "nothing is compiled behind the warm-up"
    assert session.counters.num_breaks == 0
    assert visitors.num_finished > 50
    assert visitors.num_discarded > 5
    check_keys(graphs, FULL if mode == "FULL" and backend != "FLASHINFER" else PIECEWISE)


FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def check_keys(graphs, mixed_mode):
    """All of them were replayed, under the mode that the backend's level allows."""
    keys = [captured.key for captured in graphs]
    assert {key.sampling for key in keys} == set(Sampling)
    assert {key.num_reqs for key in keys if key.query_len == 1} == {1, 2, 4, 8}
    assert {key.num_tokens for key in keys if not key.uniform} == {16, 32, 64}
    for captured in graphs:
        assert captured.mode is (FULL if captured.key.uniform else mixed_mode)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_all_modes_give_the_same_tokens(make_model, is_compiled):
    """In float32, also with 4 and 8 steps in a row. 40 s each."""
    model = cases.wide(make_model, dtype=torch.float32)
    model = cases.compiled(model) if is_compiled else model
    script = cases.arrivals(14)
    want = cases.play(small(model, cudagraph_mode="NONE"), script)
    assert len({token for found in want for token in found}) > 40
    modes = [mode for mode in CUDAGraphMode if mode is not CUDAGraphMode.NONE]
    for mode, decode_steps in itertools.product(modes, (1, 4, 8)):
        if mode is PIECEWISE and decode_steps > 1:
            continue  # the host plans every step
        mixed = None if mode is CUDAGraphMode.FULL_DECODE_ONLY else [16, 32]  # not timed
        options = {"decode_steps": decode_steps, "mixed_capture_sizes": mixed}
        session = small(model, cudagraph_mode=mode, capture_sizes=[1, 4], **options)
        assert cases.play(session, script) == want, (mode, decode_steps)
        assert session.graph_mode is mode
        assert session.num_steps["captured"] > 50
        assert (session.num_steps["called"] == 0) == (mode is not CUDAGraphMode.FULL_DECODE_ONLY)
        assert session.counters.num_recompiles == 0
        session.release()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_drafts_change_nothing(make_model, sampling):
    """Right, partly right and wrong drafts, in graphs of four rows a request. 6 s each."""
    model = cases.wide(make_model, dtype=torch.float32)
    want = small(model, cudagraph_mode="NONE").generate(PROMPTS[:4], 24, **sampling)
    session = small(model, num_draft_tokens=3, verify="always")
    ids = [session.add(prompt, 24, **sampling) for prompt in PROMPTS[:4]]
    generator, num_steps = torch.Generator().manual_seed(1), 0
    known = dict.fromkeys(ids, 0)
    while session.num_unfinished:
        drafts = {}
        for request, result in zip(ids, want, strict=True):
            draft = result.token_ids[known[request] : known[request] + 3]
            kind = int(torch.randint(0, 4, (), generator=generator))
            if kind == 0:
                draft = [(token + 1) % cases.VOCAB for token in draft]
            drafts[request] = draft[:1] if kind == 1 else draft
        for output in session.verify_draft(drafts):
            known[output.request_id] += 1
        num_steps += 1
    assert [session.result(request) for request in ids] == want
    assert num_steps < 20
    kind = Sampling.RANDOM if sampling else Sampling.GREEDY
    drafted = BatchDescriptor(16, 4, uniform=True, sampling=kind)
    assert drafted.query_len == 4
    assert {c.key: c.num_replays for c in session.graphs or ()}[drafted] > 5


# -- only the weak layers stand outside ------------------------------------------------------------


def breaks_and_segments(captured: CapturedStep) -> tuple[int, int]:
    graph = captured.graph
    if isinstance(graph, VerifiedReplay):
        graph = graph.graph
    assert isinstance(graph, PiecewiseGraph)
    return graph.num_breaks, graph.num_segments


def is_sliding(spec):
    return spec.sliding_window is not None


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("weak", ["TORCH", "FLEX"])
def test_graph_is_broken_around_the_weak_group_only(make_model, weak, is_compiled):
    """Two of four layers slide, on a backend that cannot be captured. 20 s, FLEX 50 s."""
    model = cases.wide(make_model, "gemma2", dtype=torch.float32, num_layers=4)
    model = cases.compiled(model) if is_compiled else model
    backend = grouped_backend({is_sliding: weak}, default="TRITON")
    sizes = {"capture_sizes": [1, 4], "mixed_capture_sizes": [32], "backend": backend}
    prompts = [[3], list(range(1, 60)), [7] * 9]
    want = small(model, cudagraph_mode="NONE", backend=backend).generate(prompts, 12)
    session = small(model, cudagraph_mode="FULL", verify="always", **sizes)
    assert session.generate(prompts, 12) == want
    assert {captured.mode for captured in session.graphs or ()} == {PIECEWISE}
    assert {breaks_and_segments(captured) for captured in session.graphs or ()} == {(2, 3)}
    assert session.num_steps["called"] == 0
    assert f"{weak} has level NEVER" in session.graph_mode_why
    assert "TRITON has level" not in session.graph_mode_why
    session = small(model, cudagraph_mode="PIECEWISE", **sizes)
    assert session.generate(prompts, 12) == want
    assert {breaks_and_segments(captured) for captured in session.graphs or ()} == {(4, 5)}


# -- memory ----------------------------------------------------------------------------------------


def device_bytes() -> tuple[int, int]:
    """Allocated, and reserved of the device, with nothing cached."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


LIMITS = {"resident": 16, "allocated": 1, "reserved": 32, "taken of the device": 32}
"""MiB that memory may grow by from 4,000 steps to 20,000."""


def test_20000_steps_need_no_more_memory(make_model):
    """Eight at a time; requests with all kinds of sampling come and go. 40 s."""
    session = DecodeSession(
        cases.compiled(cases.wide(make_model)), max_batch_size=8, max_tokens=512,
        max_tokens_per_step=256, backend="TRITON", decode_steps=8, capture_sizes=[1, 2, 4, 8],
        cudagraph_mode="FULL_DECODE_ONLY",
    )  # fmt: skip
    session.warm_up()
    for (mode, key), kind in itertools.product(session.plan.first_keys(), Sampling):
        with torch.no_grad():
            session.graphs.get(dataclasses.replace(key, sampling=kind), mode)
    visitors = cases.Visitors(session, max_prompt=50, max_new=300, arrival=0.3)
    samples = []
    for stop in range(4000, 20001, 4000):
        while session.num_steps["captured"] < stop:
            visitors.step()
        visitors.drain()
        taken = [*device_bytes(), -torch.cuda.mem_get_info()[0]]
        samples.append([cases.resident_bytes(), *taken])
    assert len(session.graphs or ()) == 4 * len(Sampling)
    assert visitors.num_finished > 200
    assert session.counters.num_recompiles == 0
    assert not session._requests
    assert len(session.loop.launcher.buffers) <= len(session.graphs or ())
    for (name, limit), values in zip(LIMITS.items(), zip(*samples, strict=True), strict=True):
        grown = [(value - values[0]) / MIB for value in values]
        assert max(grown) <= limit, f"{name}: MiB beyond that of 4,000 steps: {grown}"


def drop_graphs(session):
    """As `release`, but they may be captured again."""
    session.loop.drop_graphs()


def check_released(before):
    for now, then in zip(device_bytes(), before, strict=True):
        assert abs(now - then) < 4 * MIB


def test_release_gives_the_memory_back(make_model):
    """And capturing again takes as much, no more. 15 s."""
    session = DecodeSession(
        cases.wide(make_model, dtype=torch.float32, vocab_size=32000), max_batch_size=256,
        max_tokens=64, max_tokens_per_step=1024, backend="TRITON", cudagraph_mode="FULL",
        capture_sizes=[1, 8, 64, 256], mixed_capture_sizes=[64, 1024], lazy_capture=True,
    )  # fmt: skip
    want = session.generate(PROMPTS, 8)
    drop_graphs(session)  # libraries keep workspaces for the stream that was captured
    before, taken = device_bytes(), []
    for _ in range(3):
        for mode, key in session.plan.first_keys():
            with torch.no_grad():
                session.graphs.get(key, mode)
        graphs = session.graphs
        assert graphs is not None
        assert len(graphs) == 6
        taken.append(device_bytes()[1] - before[1])
        assert graphs.num_bytes > 16 * MIB
        assert taken[-1] > 0.5 * graphs.num_bytes
        assert session.generate(PROMPTS, 8) == want
        del graphs
        drop_graphs(session)
        check_released(before)
    assert max(taken) - min(taken) < 4 * MIB
    assert session.num_steps["called"] == 0
    session.generate(PROMPTS, 8)
    session.release()
    check_released(before)
    assert session.graph_mode is CUDAGraphMode.NONE
    assert session.generate(PROMPTS, 8) == want
    assert session.num_steps["called"] > 0


def test_sessions_one_after_the_other_leave_nothing(make_model):
    """Not even cuBLAS's workspace, which it keeps for every stream it has run on."""
    model, left = cases.wide(make_model), []
    for _ in range(4):
        session = cases.small(model, cudagraph_mode="FULL", mixed_capture_sizes=[16, 32])
        session.generate(PROMPTS, 8)
        session.release()
        del session
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_allocated())
    assert max(left[1:]) - left[0] < MIB, left
