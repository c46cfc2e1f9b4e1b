"""Which replays of a session are compared with calls: of new graphs, refused ones, every N-th."""

import pytest

from graphs.capture.verified import VerifiedReplay
from graphs.capture.verifier import VerificationError
from graphs.modes import BatchDescriptor
from tests.kit.sessions import captured_lazily, uncaptured

DECODE = BatchDescriptor(1, 1, uniform=True)
PROMPT = [[3, 4, 5]]


def num_checked(session) -> int:
    assert session.verifier is not None
    return session.verifier.num_checked


@pytest.mark.parametrize(("verify", "wanted"), [("first", 1), (2, 4), (3, 3), ("always", 7)])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_replays_of_a_key_are_counted(model, verify, wanted, mode):
    session = captured_lazily(model, verify=verify, cudagraph_mode=mode)
    assert session.generate(PROMPT, 8) == uncaptured(model).generate(PROMPT, 8)
    mixed = int(mode == "PIECEWISE")  # the prompt is a replay of a key of its own
    assert session.num_steps["captured"] == 7 + mixed
    assert num_checked(session) == wanted + mixed


def test_a_graph_made_anew_is_checked_anew(model):
    session = captured_lazily(model, cudagraph_mode="FULL_DECODE_ONLY", verify="first")
    for number in (1, 2):
        session.generate(PROMPT, 4)
        session.generate(PROMPT, 4)
        assert num_checked(session) == number
        session.runner.release()


def test_a_refused_replay_is_not_counted(model):
    """The first one that runs is the first one."""
    session = captured_lazily(model, cudagraph_mode="FULL_DECODE_ONLY", verify="first")
    request = session.add(PROMPT[0], 4)
    session.step()
    assert session.graphs is not None
    captured = session.graphs.get(DECODE, session.graph_mode.decode_mode())
    assert captured is not None
    caches, old = session.cache.tensors, session.cache.tensors[0]
    caches[0] = old.clone()
    with pytest.raises(ValueError, match="must stay where they were"):
        session.step()
    caches[0] = old
    assert num_checked(session) == 0
    while session.num_unfinished:
        session.step()
    assert num_checked(session) == 1
    assert session.result(request) == uncaptured(model).generate(PROMPT, 4)[0]


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_a_wrong_replay_is_caught_and_the_next_one_checked(model, mode):
    """Here a graph that draws another token; the request goes on when it is right again."""
    session = captured_lazily(model, verify="first", cudagraph_mode=mode)
    request = session.add(PROMPT[0], 4)
    session.step()
    assert session.graphs is not None
    captured = session.graphs.get(DECODE, session.graph_mode.decode_mode())
    assert captured is not None
    assert isinstance(captured.graph, VerifiedReplay)
    graph, before = captured.graph.graph, num_checked(session)
    right = graph.replay

    def wrong(metadata=None) -> None:
        right(metadata)
        captured.tensors.device["tokens"].add_(1).remainder_(64)

    graph.replay = wrong
    for _ in range(2):
        with pytest.raises(VerificationError, match="got tokens"):
            session.step()
    graph.replay = right
    while session.num_unfinished:
        session.step()
    assert num_checked(session) == before + 3
    assert session.result(request) == uncaptured(model).generate(PROMPT, 4)[0]
