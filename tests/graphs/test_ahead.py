"""Steps are launched before the tokens of the last ones are read, whatever changes in between.

The device of these tests hands out no token before the host waits for it.
"""

import itertools

import pytest

from graphs.modes import CUDAGraphMode
from tests.kit.sessions import asynchronous, captured_lazily, drain, is_empty, uncaptured

PROMPTS = [[3], [5, 9], list(range(1, 18)), [1, 2, 3, 4], [7] * 9, [60, 61], [8] * 30]
MODES = [m for m in CUDAGraphMode if m is not CUDAGraphMode.NONE]
NEW = [9, 14, 3, 1, 12, 8, 5]


def run(session, news=None, **sampling):
    """Requests of different lengths, more than the batch holds."""
    news = news or NEW
    ids = [session.add(p, n, **sampling) for p, n in zip(PROMPTS, news, strict=True)]
    streamed = drain(session)
    results = [session.result(i) for i in ids]
    assert [streamed[i] for i in ids] == [r.token_ids for r in results]
    for request in ids:
        session.discard(request)
    assert is_empty(session)
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_only_the_first_step_is_waited_for(model, mode, decode_steps):
    """Prompts, chunks of them, requests that join and end by length: all are launched ahead."""
    want = run(uncaptured(model, max_tokens_per_step=16))
    options = {"cudagraph_mode": mode, "decode_steps": decode_steps, "max_tokens_per_step": 16}
    session = captured_lazily(model, **options)
    log = asynchronous(session)
    assert run(session) == want
    assert log[:3] == ["launch", "launch", "wait"]
    assert session.loop.num_launches["waited"] == 1
    assert session.loop.num_launches["ahead"] == log.count("launch") - 1
    assert list(itertools.pairwise(log)).count(("wait", "wait")) == 1  # the last two


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}])
def test_stop_tokens_are_found_one_launch_late(model, decode_steps, sampling):
    """What was drawn after them is dropped, and their blocks serve others."""
    small = {"max_tokens_per_step": 16, "cache_tokens": 160}
    free = run(uncaptured(model, **small), [20] * 7, **sampling)
    stops = sorted({t for r in free for t in r.token_ids[2:5]})[:3]
    want = run(uncaptured(model, **small), [20] * 7, eos=stops, **sampling)
    assert {r.finish_reason for r in want} == {"eos", "length"}
    session = captured_lazily(model, decode_steps=decode_steps, **small)
    asynchronous(session)
    assert run(session, [20] * 7, eos=stops, **sampling) == want


def test_penalties_count_tokens_that_the_host_knows(model):
    sampling = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    want = run(uncaptured(model), **sampling)
    session = captured_lazily(model, decode_steps=2)
    asynchronous(session)
    assert run(session, **sampling) == want


def test_edits_by_tokens_come_while_the_model_runs(model):
    """Only steps that hold prompts, or follow one, wait for the tokens."""
    plain = run(uncaptured(model), [20] * 7)
    pairs = {pair for r in plain for pair in list(itertools.pairwise(r.token_ids))[3:9:2]}
    asked = {"bad_words": sorted(map(list, pairs))}
    free = run(uncaptured(model), [20] * 7, **asked)
    assert free != plain
    drawn = [token for r in free for token in r.token_ids[6:]]
    asked["eos"] = min(drawn, key=drawn.count)
    want = run(uncaptured(model), [20] * 7, **asked)
    assert {r.finish_reason for r in want} == {"eos", "length"}
    session = captured_lazily(model)
    log = asynchronous(session)
    assert run(session, [20] * 7, **asked) == want
    assert session.loop.num_launches["ahead"] > 2 * session.loop.num_launches["waited"]
    assert log.count("launch") == sum(session.num_steps.values())


def test_a_discarded_request_is_in_flight(model):
    """Its tokens count for nothing; whoever gets its blocks is not disturbed."""
    session = captured_lazily(model, cache_tokens=48, max_tokens_per_step=8)
    asynchronous(session)
    gone = [session.add([9] * 20, 20), session.add([2], 9)]
    for _ in range(5):
        session.step()
    for request in gone:
        session.discard(request)
    want = uncaptured(model).generate(PROMPTS, 7)
    assert session.generate(PROMPTS, 7) == want
    assert is_empty(session)


def test_an_observer_sees_every_step_whose_tokens_it_is_told(model):
    """Also of a step that was called before it came."""
    prompts = [[5] * 12, [6] * 40]
    session = captured_lazily(model, cudagraph_mode="FULL_DECODE_ONLY", max_tokens_per_step=8)
    asynchronous(session)
    ids = [session.add(p, 5) for p in prompts]
    for _ in range(3):
        session.step()
    assert session.loop._launched.captured is None
    seen = []
    with session.observe_logits(
        lambda step, logits: seen.extend(
            (s.request.id, int(row.argmax()))
            for s, row in zip(step, logits, strict=True)
            if s.wants_token
        )
    ):
        told = [(o.request_id, o.token_id) for _ in range(2) for o in session.step()]
    assert seen == told
    assert seen
    drain(session)
    want = uncaptured(model).generate(prompts, 5)
    assert [session.result(i) for i in ids] == want


def test_verified_steps_and_plans_in_turn_are_waited_for(model, monkeypatch):
    want = uncaptured(model).generate(PROMPTS, 6)
    session = captured_lazily(model, verify="always")
    log = asynchronous(session)
    assert session.generate(PROMPTS, 6) == want
    assert log[0::2] == ["launch"] * (len(log) // 2)
    session = captured_lazily(model)
    monkeypatch.setattr(type(session.builder), "plans_in_turn", True)
    session = captured_lazily(model, cudagraph_mode="PIECEWISE")
    log = asynchronous(session)
    assert session.generate(PROMPTS, 6) == want
    assert log[0::2] == ["launch"] * (len(log) // 2)


def test_a_model_without_graphs_on_a_cpu_computes_nothing_ahead(model):
    """There the host computes the step itself: a token would come a step later."""
    session = uncaptured(model)
    log = asynchronous(session)
    session.generate(PROMPTS, 6)
    assert log[0::2] == ["launch"] * (len(log) // 2)
    assert session.loop.num_launches["ahead"] == 0


def test_samples_of_a_prompt_share_it_one_launch_after_it(model):
    """They need not wait until its tokens are read."""
    session = captured_lazily(
        model, cudagraph_mode="FULL_DECODE_ONLY", share_prefixes=True, max_tokens_per_step=32
    )
    asynchronous(session)
    prompt, sizes = list(range(1, 18)), []
    original = session.loop.launcher.call

    def call(rows, *arguments, **options):
        sizes.append([s.num_tokens for s in rows])
        return original(rows, *arguments, **options)

    session.loop.launcher.call = call
    got = session.generate([prompt], 6, n=4, temperature=1.0, seed=3)
    assert sizes[0] == [17]
    assert session.num_steps["captured"] >= 5
    assert session.loop.num_launches["waited"] == 1
    assert session.num_steps == {"captured": 6, "called": 1}
    assert got == uncaptured(model).generate([prompt], 6, n=4, temperature=1.0, seed=3)


def test_a_launch_that_fails_loses_no_token(model, monkeypatch):
    """Tokens of the steps before come with the next call, then it is launched again."""
    session = captured_lazily(model, cudagraph_mode="FULL_DECODE_ONLY", max_tokens_per_step=8)
    asynchronous(session)
    ids, call = [session.add(p, 6) for p in ([1, 2], [5] * 30)], session.runner.call
    outputs = session.step()

    def fails(*arguments, **options):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(session.runner, "call", fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        session.step()
    outputs += session.step()
    with pytest.raises(RuntimeError, match="out of luck"):
        session.step()
    monkeypatch.setattr(session.runner, "call", call)
    streamed = drain(session, outputs)
    want = uncaptured(model).generate([[1, 2], [5] * 30], 6)
    assert [streamed[i] for i in ids] == [r.token_ids for r in want]
