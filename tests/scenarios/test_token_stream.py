"""Tokens are handed out once and in order, whatever other calls take steps in between."""

import pytest

import graphs
from tests.kit.sessions import captured_lazily, drain, uncaptured


def begun(model, **options):
    """A request whose next steps are launched, and what was handed out."""
    session = captured_lazily(model, decode_steps=4, **options)
    request, outputs = session.add([1, 2], 12), []
    for _ in range(2):
        outputs += session.step()
    assert session.loop._launched is not None
    return session, request, outputs


def failing_drafts(session):
    session.loop._run_alone = None
    with pytest.raises(TypeError):
        session.verify_draft({})
    del session.loop._run_alone


OTHERS = {
    "release": lambda session: session.release(),
    "generate": lambda session: session.generate([[3, 4]], 20),
    "failing drafts": failing_drafts,
}


@pytest.mark.parametrize("call", OTHERS)
def test_no_token_of_the_stream_is_lost(model, call):
    want = uncaptured(model).generate([[1, 2]], 12)[0].token_ids
    session, _, outputs = begun(model, num_draft_tokens=2)
    OTHERS[call](session)
    assert session.num_unfinished == 1
    while session.num_unfinished:
        outputs += session.step()
    assert [o.token_id for o in outputs] == want
    assert [o.finish_reason for o in outputs] == [None] * 11 + ["length"]


def test_a_dump_in_the_middle_loses_no_token(model, tmp_path):
    session, request, outputs = begun(model)
    with graphs.dump(tmp_path):
        outputs += session.step()
    assert drain(session, outputs)[request] == session.result(request).token_ids


def test_tokens_of_discarded_requests_are_not_handed_out(model):
    session, request, _ = begun(model)
    session.release()
    session.discard(request)
    assert session.num_unfinished == 0
    assert session.step() == []
