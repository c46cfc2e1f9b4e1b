"""`AsyncSession.call`: functions of the session between two steps."""

import threading
import time

import pytest

from graphs.async_session import SessionClosedError
from tests.graphs.test_async_session import PATIENCE, gate, opened, session
from tests.kit.sessions import PROMPTS

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]
__all__ = ["gate", "opened", "session"]


def test_calls_between_steps(opened, session, gate):
    """They run beside requests, raise what they raise, and are refused once it is closed."""
    handle = opened.submit(PROMPTS[0], 20)
    weights = {name: value.clone() for name, value in session.original.state_dict().items()}
    called = threading.Thread(target=opened.call, args=(lambda s: s.update_weights(weights),))
    called.start()
    gate.open.set()
    called.join(PATIENCE)
    assert len(handle.result(PATIENCE).token_ids) == 20
    assert opened.call(lambda s: s.weight_version) == 1
    with pytest.raises(ValueError, match="must be"):
        opened.call(lambda s: s.update_weights({"none": weights["lm_head.weight"]}))
    opened.close()
    with pytest.raises(SessionClosedError):
        opened.call(lambda s: s.weight_version)


def test_a_call_that_has_not_begun(opened, gate):
    opened.submit(PROMPTS[0], 20)
    raised = []

    def call():
        try:
            opened.call(lambda session: None)
        except SessionClosedError as error:
            raised.append(error)

    called = threading.Thread(target=call)
    called.start()
    while not opened._calls:
        time.sleep(0.01)
    opened._closing = True
    gate.open.set()
    called.join(PATIENCE)
    assert len(raised) == 1
