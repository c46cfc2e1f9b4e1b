"""Ctrl-C waits for the end of a step, then it is raised: no token and no block is lost."""

import signal
import threading

import pytest

from graphs.context import uninterrupted
from tests.kit.sessions import PROMPTS, captured_lazily, drain, is_empty, make_session, uncaptured


@pytest.fixture(autouse=True)
def _listens():
    """Tests that a shell runs in the background start with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(session, monkeypatch, number: int) -> None:
    """Ctrl-C while the session runs the `number`-th of the steps that it calls or replays."""
    runs = []

    def wrapped(original):
        def run(*arguments, **options):
            runs.append(1)
            if len(runs) == number:
                signal.raise_signal(signal.SIGINT)
            return original(*arguments, **options)

        return run

    for name in ("call", "launch"):
        monkeypatch.setattr(session.runner, name, wrapped(getattr(session.runner, name)))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_an_interrupted_step_loses_nothing(model, monkeypatch, number):
    want = uncaptured(model).generate(PROMPTS, 12)
    session = captured_lazily(model, max_batch_size=2, decode_steps=2)
    ids, outputs, interrupts = [session.add(p, 12) for p in PROMPTS], [], 0
    interrupting(session, monkeypatch, number)
    while session.num_unfinished:
        try:
            outputs += session.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    streamed = drain(session, outputs)
    assert [streamed[i] for i in ids] == [r.token_ids for r in want]
    assert is_empty(session)


@pytest.mark.parametrize("number", [1, 4])
def test_an_interrupted_generate_leaves_nothing(model, monkeypatch, number):
    want = uncaptured(model).generate(PROMPTS, 6)
    session = captured_lazily(model)
    interrupting(session, monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        session.generate(PROMPTS, 6)
    assert session.num_unfinished == 0
    assert is_empty(session)
    assert not session._requests
    assert session.generate(PROMPTS, 6) == want


def test_a_model_that_raises_leaves_a_usable_session(model):
    want = uncaptured(model).generate(PROMPTS, 6)
    session = uncaptured(model)
    session.warm_up()
    handle = model.model.layers[0].register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        session.generate(PROMPTS, 6)
    handle.remove()
    assert is_empty(session)
    assert session.generate(PROMPTS, 6) == want


def test_an_interrupted_warm_up_is_repeated(model, monkeypatch):
    session = make_session(model, max_batch_size=1, max_tokens=8)
    compiled = []

    def once():
        compiled.append(1)
        if len(compiled) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(session.compilation, "_call_model", once)
    with pytest.raises(KeyboardInterrupt):
        session.warm_up()
    session.warm_up()
    session.warm_up()
    assert len(compiled) == 2


def test_the_callers_handler_gets_the_signal_after_the_block():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
    try:
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            seen.append("end")
        thread = threading.Thread(target=lambda: uninterrupted().__enter__())
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["end", "handled", "handled"]
