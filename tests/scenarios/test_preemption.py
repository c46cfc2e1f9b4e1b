"""Sessions whose requests grow out of the cache: the tokens of sessions with room for all."""

# pyright: reportOptionalMemberAccess=false
import pytest

from tests.kit.models import build_model
from tests.kit.sessions import (
    captured_lazily,
    drafted,
    drain,
    is_empty,
    make_session,
    poisoned,
    tokens_of,
    uncaptured,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[1, 2, 3], [4, 5], [7] * 6, [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 1], [9]]
FAMILIES = ("mistral", "gemma2", "gpt_oss", "deepseek_v2")
DRAWN = {"temperature": 1.0, "seed": 3}
PENALIZED = DRAWN | {"presence_penalty": 0.5, "repetition_penalty": 1.2}


def tight(model, make=make_session, **options):
    """Its cache holds about half of what its requests need at their longest."""
    options = {"cache_tokens": 40, "max_batch_size": 4} | options
    return poisoned(make(model, **options))


@pytest.mark.parametrize("sampling", [{}, DRAWN, PENALIZED], ids=["greedy", "drawn", "penalized"])
@pytest.mark.parametrize("max_tokens_per_step", [3, 100])
def test_tokens_are_those_with_room_for_all(model, sampling, max_tokens_per_step):
    want = make_session(model).generate(PROMPTS, 20, **sampling)
    session = tight(model, max_tokens_per_step=max_tokens_per_step)
    assert session.generate(PROMPTS, 20, **sampling) == want
    counts = session.report().preemptions
    assert counts.num_preemptions > 0
    assert counts.num_recomputed_tokens > 0
    assert is_empty(session)
    assert "preemptions" in str(session.report())


def test_whole_lengths_may_be_reserved(model):
    want = make_session(model).generate(PROMPTS, 20)
    session = tight(model, reserve="length")
    assert session.generate(PROMPTS, 20) == want
    assert session.report().preemptions is None
    assert "preemptions" not in str(session.report())


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    """Windows, sinks and latents."""
    model = build_model(name)
    want = make_session(model).generate(PROMPTS, 20)
    session = tight(model, share_prefixes=name == "gemma2")
    assert session.generate(PROMPTS, 20) == want
    assert session.report().preemptions.num_preemptions > 0


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_captured(model, decode_steps, mode):
    options = {"decode_steps": decode_steps, "cudagraph_mode": mode}
    want = uncaptured(model).generate(PROMPTS, 20, **DRAWN)
    session = tight(model, captured_lazily, **options)
    ids = [session.add(p, 20, **DRAWN) for p in PROMPTS]
    streamed = drain(session)
    assert [streamed[i] for i in ids] == tokens_of(want), "handed out once, and in order"
    assert session.report().preemptions.num_preemptions > 0
    assert is_empty(session)


def test_drafts(model):
    alone = tokens_of(make_session(model).generate(PROMPTS, 20))
    session = tight(model, num_draft_tokens=3)
    results, _ = drafted(session, PROMPTS, alone, lambda following: following[:3])
    assert tokens_of(results) == alone
    assert session.report().preemptions.num_preemptions > 0


def test_one_that_cannot_fit_alone_is_refused(model):
    session = tight(model, cache_tokens=20)
    with pytest.raises(ValueError, match=r"^prompt and max_new_tokens must fit into the cache of"):
        session.add([1] * 5, 17)
    assert len(session.generate([[1] * 5], 16)[0].token_ids) == 16
    with pytest.raises(ValueError, match=r"^reserve must be known, got 'all'; supported: need, le"):
        make_session(model, reserve="all")
