"""Interrupts between any two lines: the same tokens, none twice, no block lost."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
import contextlib
import random

import pytest

from tests.kit.interrupts import CACHE, CALLS, SESSION, Interrupt, stepped
from tests.kit.sessions import PROMPTS, captured_lazily, drain, is_empty, make_session, uncaptured

pytestmark = pytest.mark.usefixtures("one_thread")

PENALIZED = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}


@pytest.mark.parametrize("sampling", [{}, PENALIZED])
@pytest.mark.parametrize("number", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_interrupted_anywhere(model, sampling, number):
    """Between any two lines of a step: the same tokens, none twice, no block lost."""
    want = uncaptured(model, max_batch_size=2).generate(PROMPTS, 12, **sampling)

    def begun():
        session = captured_lazily(model, max_batch_size=2, decode_steps=4)
        session.generate(PROMPTS[:1], 3, **sampling)
        return session, [session.add(p, 12, **sampling) for p in PROMPTS]

    for interrupt, session, ids, outputs in stepped(begun, number, (*SESSION, *CACHE)):
        assert [session.result(i) for i in ids] == want, interrupt.at
        for request, result in zip(ids, want, strict=True):
            streamed = [o.token_id for o in outputs if o.request_id == request]
            assert len(streamed) <= len(result.token_ids), interrupt.at
            session.discard(request)
        assert is_empty(session), interrupt.at
        if not interrupt.at:
            assert interrupt.num_lines > 4500  # code that moves to another file is missed here
            assert interrupt.seen == set(interrupt.files)  # and so is a file that moves


@pytest.mark.parametrize("number", range(1, 12, 2))
def test_interrupted_while_tokens_are_taken(model, number, monkeypatch):
    want = uncaptured(model).generate(PROMPTS[:1], 20)
    session = captured_lazily(model, decode_steps=8)
    request, take, taken = session.add(PROMPTS[0], 20), session.token_stream._take, []

    def interrupted(*arguments):
        take(*arguments)
        taken.append(1)
        if len(taken) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(session.token_stream, "_take", interrupted)
    outputs = []
    with contextlib.suppress(KeyboardInterrupt):
        while session.num_unfinished:
            outputs += session.step()
    assert len(taken) == number
    assert drain(session, outputs)[request] == want[0].token_ids
    assert session.result(request) == want[0]


def test_an_interrupted_generate_leaves_nothing(model):
    want = uncaptured(model).generate(PROMPTS, 6)
    session = captured_lazily(model, decode_steps=4)
    count = Interrupt(0, CALLS)
    count.during(lambda: session.generate(PROMPTS, 6))
    for at in random.Random(1).sample(range(1, count.num_lines), 15):
        session = captured_lazily(model, decode_steps=4)
        Interrupt(at, CALLS).during(lambda session=session: session.generate(PROMPTS, 6))
        assert session.num_unfinished == 0, at
        assert is_empty(session), at
        assert session.generate(PROMPTS, 6) == want, at


def test_an_interrupted_generate_leaves_nothing_behind(model, monkeypatch):
    session = make_session(model, max_batch_size=2, max_tokens=32)
    free, original = session.cache.num_free_blocks, session.runner.call

    def interrupt(*arguments, **options):
        if session.num_steps["called"] > 3:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(session.runner, "call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.generate([[1], [2], [3]], 20)
    assert session.num_unfinished == 0
    assert session.cache.num_free_blocks == free
    assert not session._requests


def test_an_interrupted_warm_up_is_repeated(model, monkeypatch):
    session = make_session(model, max_batch_size=1, max_tokens=8)
    compiled = []

    def once():
        compiled.append(1)
        if len(compiled) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(session.compilation, "_call_model", once)
    with pytest.raises(KeyboardInterrupt):
        session.warm_up()
    session.warm_up()
    session.warm_up()
    assert len(compiled) == 2
