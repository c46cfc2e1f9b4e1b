"""Functions that an `AsyncSession` calls: between two steps, with tokens, with results."""

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from graphs import RequestError
from graphs.async_session import SessionClosedError
from tests.graphs.test_async_session import PATIENCE, gate, opened, session, until
from tests.kit.sessions import PROMPTS

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]
__all__ = ["gate", "opened", "session"]


def test_calls_between_steps(opened, session, gate):
    """They run beside requests, raise what they raise, and are refused once it is closed."""
    handle = opened.submit(PROMPTS[0], 20)
    weights = {name: value.clone() for name, value in session.original.state_dict().items()}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(opened.call, lambda s: s.update_weights(weights))
        gate.open.set()
    assert len(handle.result(PATIENCE).token_ids) == 20
    assert opened.call(lambda s: s.weight_version) == 1
    with pytest.raises(ValueError, match="must be"):
        opened.call(lambda s: s.update_weights({"none": weights["lm_head.weight"]}))
    opened.close()
    with pytest.raises(SessionClosedError):
        opened.call(lambda s: s.weight_version)


def test_a_call_that_has_not_begun(opened, gate):
    opened.submit(PROMPTS[0], 20)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(opened.call, lambda session: None)
        until(lambda: opened._calls)
        opened._closing = True
        gate.open.set()
        with pytest.raises(SessionClosedError):
            called.result(PATIENCE)


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
@pytest.mark.parametrize("name", ["on_output", "logits_processor"])
def test_an_error_of_a_requests_code_ends_it_alone(opened, name, error):
    def raises(*_):
        raise error("of its own")

    seen = []
    bad = opened.submit([1, 2], 8, **{name: raises})
    good = opened.submit([5, 9, 3], 8, on_output=seen.append)
    with pytest.raises((error, RequestError), match="of its own"):
        bad.result(60)
    tokens = good.result(60).token_ids
    assert [output.token_id for output in seen] == tokens
    ended = []
    opened.submit([1], 2).when_done(lambda future: ended.append(future.result().token_ids))
    assert len(opened.submit([1], 4).result(60).token_ids) == 4
    assert len(ended[0]) == 2


def test_grammars_are_compiled_beside_steps(opened, session, monkeypatch):
    """Others go on meanwhile, and one that is aborted before never begins."""
    compiling, go_on = threading.Event(), threading.Event()

    def compile_grammar(wanted):
        compiling.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(session.book, "compile_grammar", compile_grammar)
    asked = {"structured_outputs": {"choice": ["a"]}}
    waiting, aborted = opened.submit([1, 2], 8, **asked), opened.submit([1, 2], 8, **asked)
    assert compiling.wait(PATIENCE)
    assert len(opened.submit([5, 9, 3], 8).result(PATIENCE).token_ids) == 8
    aborted.abort()
    with pytest.raises(CancelledError):
        aborted.result(PATIENCE)
    assert not waiting._future.done()
    go_on.set()
    with pytest.raises(ValueError, match="must come with DecodeSession"):
        waiting.result(PATIENCE)
    until(lambda: not opened._waiting)
    assert session.num_unfinished == 0
