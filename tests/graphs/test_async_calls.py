"""Functions that an `AsyncSession` calls: between two steps, with tokens, with results."""

from concurrent.futures import ThreadPoolExecutor

import pytest

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


def test_an_error_of_on_output_ends_its_request_alone(opened):
    seen = []
    bad = opened.submit([1, 2], 8, on_output=lambda output: 1 / 0)
    good = opened.submit([5, 9, 3], 8, on_output=seen.append)
    with pytest.raises(ZeroDivisionError):
        bad.result(60)
    tokens = good.result(60).token_ids
    assert [output.token_id for output in seen] == tokens
    ended = []
    opened.submit([1], 2).when_done(lambda future: ended.append(future.result().token_ids))
    assert len(opened.submit([1], 4).result(60).token_ids) == 4
    assert len(ended[0]) == 2
