"""Sessions of models whose layers all have a window: blocks behind it go back."""

# pyright: reportOptionalMemberAccess=false
import pytest

from tests.kit.models import build_model
from tests.kit.sessions import captured_lazily, is_empty, make_session, poisoned

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [list(range(1, 41)), [7] * 9, [3, 4], list(range(5, 30))]
OPTIONS = {"max_batch_size": 4, "max_tokens_per_step": 8, "max_tokens": 64, "block_size": 4}


@pytest.fixture(scope="module")
def model():
    return build_model("mistral")  # a window of 6


def most_owned(session, prompts, new):
    """Results, and the most blocks that were owned after a step."""
    ids, most = [session.add(p, new) for p in prompts], 0
    while session.num_unfinished:
        session.step()
        most = max(most, session.cache.num_blocks - 1 - session.cache.num_free_blocks)
    return [session.result(i) for i in ids], most


@pytest.mark.parametrize("make", [make_session, captured_lazily])
@pytest.mark.parametrize("reserve", ["need", "length"])
def test_tokens_are_right_and_blocks_go_back(model, make, reserve):
    want = make_session(model, max_batch_size=1).generate(PROMPTS, 20)
    session = poisoned(make(model, reserve=reserve, **OPTIONS))
    results, most = most_owned(session, PROMPTS[:1], 20)
    assert results == want[:1]
    if reserve == "need":
        assert most <= 3 + 2 * 2 + 16, "window, two chunks of 8, and 64 tokens in advance"
    for request in list(session._requests):
        session.discard(request)
    assert session.generate(PROMPTS, 20) == want
    assert is_empty(session)


def test_more_run_in_a_small_cache(model):
    """Four prompts of 40 tokens in 80: each needs its window and what is computed at a time."""
    prompts = [[first, *PROMPTS[0][1:]] for first in (1, 2, 3, 4)]
    want = make_session(model, max_batch_size=1).generate(prompts, 12)
    session = poisoned(make_session(model, cache_tokens=80, **OPTIONS))
    running, steps = 0, 0
    ids = [session.add(p, 12) for p in prompts]
    while session.num_unfinished:
        session.step()
        steps += 1
        running = max(running, len(session.scheduler.running))
    assert [session.result(i) for i in ids] == want
    assert running >= 3, "by whole prompts two fit"


def test_blocks_go_back_when_they_are_needed(model, monkeypatch):
    """Replays go on by themselves beside requests that wait; a change of tables ends that."""
    session = captured_lazily(model, **OPTIONS | {"max_batch_size": 2})
    fills, fill = [], session.runner.fill
    monkeypatch.setattr(session.runner, "fill", lambda *a, **k: (fills.append(a), fill(*a, **k)))
    for first in range(4):
        session.add([first + 1] * 4, 56, eos=())
    num_steps = 0
    while session.scheduler.waiting:
        num_steps += len(session.step()) // 2
    assert num_steps > 50
    assert len(fills) < 8


def test_with_shared_prefixes(model):
    want = make_session(model, max_batch_size=1).generate(PROMPTS, 12)
    session = poisoned(make_session(model, share_prefixes=True, cache_tokens=120, **OPTIONS))
    for _ in range(2):
        assert session.generate(PROMPTS, 12) == want
    assert session.report().prefixes.num_hits >= 4
    assert is_empty(session)


def test_a_layer_that_sees_all_keeps_all():
    for name, window in (("mistral", 6), ("gemma2", None), ("llama", None), ("gpt_oss", None)):
        assert make_session(build_model(name)).cache.window == window
