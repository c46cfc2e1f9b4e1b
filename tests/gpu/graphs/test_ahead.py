"""Steps launched ahead of their tokens on a GPU: no wait that nobody asked for, the same tokens."""

import pytest
import torch
from transformers import masking_utils

from graphs import DecodeSession
from tests.fuzz.sessions import results_alone, run_session
from tests.gpu import graph_cases as cases
from tests.kit.sessions import drain

pytestmark = pytest.mark.gpu

MODES = ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE", "NONE"]
PROMPTS = [[i + 1] * (1 + 7 * i % 40) for i in range(14)]
NEW = [3 + 5 * i % 17 for i in range(14)]
SIZES = {
    "max_batch_size": 4,
    "max_tokens": 128,
    "max_tokens_per_step": 32,
    "backend": "TRITON",
    "mixed_capture_sizes": [16, 32],
}


def run(session, **sampling):
    ids = [session.add(p, n, **sampling) for p, n in zip(PROMPTS, NEW, strict=True)]
    streamed = drain(session)
    for request in ids:
        session.discard(request)
    return [streamed[request] for request in ids]


@pytest.fixture(scope="module")
def model(make_model):
    return cases.wide(make_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def alone(model):
    session = DecodeSession(model, cudagraph_mode="NONE", **(SIZES | {"max_batch_size": 1}))
    return run(session)


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_but_for_tokens(model, alone, mode, decode_steps, monkeypatch):
    """Torch raises at an implicit wait: a copy from pageable memory, or a value that is read.

    Transformers itself reads positions to find packed sequences, where nothing is compiled.
    """
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)
    session = DecodeSession(model, cudagraph_mode=mode, decode_steps=decode_steps, **SIZES)
    assert run(session) == alone
    before = dict(session.loop.num_launches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert run(session) == alone
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = session.loop.num_launches
    assert after["waited"] - before["waited"] <= 1
    assert after["ahead"] - before["ahead"] > 10


@pytest.mark.parametrize("mode", MODES)
def test_a_device_that_is_late_reads_what_was_meant_for_it(model, alone, mode, monkeypatch):
    """The host runs ahead as far as it may: it overwrites nothing that is not read yet."""
    session = DecodeSession(model, cudagraph_mode=mode, **SIZES)
    run(session)
    fill = session.runner.fill

    def late(*arguments, **edits):
        torch.cuda._sleep(5_000_000)
        fill(*arguments, **edits)
        torch.cuda._sleep(5_000_000)

    monkeypatch.setattr(session.runner, "fill", late)
    assert run(session) == alone


def test_edits_reach_a_device_that_is_late(model, monkeypatch):
    """Of the step they were made for: they are uploaded while the model of that step runs."""
    asked = {"bad_words": [[a, b] for a in range(0, 256, 3) for b in range(0, 256, 5)]}
    want = [
        r.token_ids
        for r in DecodeSession(model, cudagraph_mode="NONE", **SIZES).generate(PROMPTS, 24, **asked)
    ]
    session = DecodeSession(model, **SIZES)
    fill, finish = session.runner.fill, session.runner.finish

    def late(run):
        def called(*arguments, **edits):
            torch.cuda._sleep(5_000_000)
            run(*arguments, **edits)
            torch.cuda._sleep(5_000_000)

        return called

    monkeypatch.setattr(session.runner, "fill", late(fill))
    monkeypatch.setattr(session.runner, "finish", late(finish))
    assert [r.token_ids for r in session.generate(PROMPTS, 24, **asked)] == want
    assert session.loop.num_launches["ahead"] > session.loop.num_launches["waited"]


@pytest.mark.parametrize("mode", MODES)
def test_each_step_in_another_stream(model, alone, mode, monkeypatch):
    """Each is late, and changes tensors that the last one reads."""
    session = DecodeSession(model, cudagraph_mode=mode, **SIZES)
    run(session)
    fill, streams = session.runner.fill, [torch.cuda.Stream() for _ in range(2)]

    def late(*arguments, **edits):
        torch.cuda._sleep(5_000_000)
        fill(*arguments, **edits)

    monkeypatch.setattr(session.runner, "fill", late)
    ids, number = [session.add(p, n) for p, n in zip(PROMPTS, NEW, strict=True)], 0
    while session.num_unfinished:
        with torch.cuda.stream(streams[number // 3 % 2]):
            session.step()
        number += 1
    assert [session.result(i).token_ids for i in ids] == alone


@pytest.mark.parametrize("mode", MODES)
def test_stop_tokens_and_samples(model, mode):
    sampling = {"temperature": 0.9, "seed": 5}
    called = DecodeSession(model, cudagraph_mode="NONE", **SIZES)
    free = run(called, **sampling)
    stops = sorted({tokens[1] for tokens in free if len(tokens) > 3})[:3]
    want = run(called, eos=stops, **sampling)
    assert want != free
    session = DecodeSession(model, cudagraph_mode=mode, decode_steps=4, **SIZES)
    assert run(session, eos=stops, **sampling) == want


def test_random_sessions(model):
    changes = {"block_size": 16, "backend": "TRITON"}
    alone = results_alone(model, **changes)
    for seed in range(60):
        run_session(model, alone, seed, debug=None, cache_tokens=256, **changes)


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_captured_steps_with_prompts_are_timed(model, alone, mode):
    """A tiny model waits for launches: replays gain, and smaller ones are not timed."""
    sizes = {name: value for name, value in SIZES.items() if name != "mixed_capture_sizes"}
    session = DecodeSession(model, cudagraph_mode=mode, **sizes)
    assert run(session) == alone
    gains = list(session.loop.gains)
    assert [gain.num_tokens for gain in gains] == [32]
    assert all(0 < gain.replay_ms < 100 and 0 < gain.call_ms < 1000 for gain in gains)
    assert session.num_steps["called"] == 0
