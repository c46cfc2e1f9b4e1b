"""Requests that share a prefix: attention reads it once, and the tokens stay what they were."""

import pytest

from graphs import BatchDescriptor
from graphs.step import shared
from tests.kit.models import build_model
from tests.kit.random_sessions import results_alone, run_session
from tests.kit.sessions import is_empty, make_session, poisoned, tokens_of

PREFIX = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
PROMPTS = [[*PREFIX, 1], [*PREFIX, 2, 3, 4], [*PREFIX, 5, 6], [*PREFIX]]
OTHER = [7] * 9


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


@pytest.fixture(autouse=True)
def small_prefixes_pay(monkeypatch):
    monkeypatch.setattr(shared, "LEAST_REQUESTS", 2)
    monkeypatch.setattr(shared, "LEAST_TOKENS", 1)


@pytest.fixture
def lengths(monkeypatch):
    """Prefixes of the steps whose metadata is made for a cascade."""
    found = []
    session_of = make_session

    def make(model, **options):
        session = session_of(model, **({"share_prefixes": True, "debug": "eager_replay"} | options))
        build = session.builder.build_cascade

        def watched(common, prefix_len):
            found.append(int(prefix_len))
            return build(common, prefix_len)

        monkeypatch.setattr(session.builder, "build_cascade", watched)
        return poisoned(session)

    return make, found


def alone(model, prompts, number):
    session = make_session(model, max_batch_size=1, cudagraph_mode="NONE")
    return [tokens_of(session.generate([prompt], number))[0] for prompt in prompts]


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"])
def test_tokens_stay(model, lengths, mode, decode_steps):
    make, found = lengths
    debug = None if mode == "NONE" else "eager_replay"
    session = make(model, cudagraph_mode=mode, debug=debug, decode_steps=decode_steps)
    assert tokens_of(session.generate(PROMPTS, 9)) == alone(model, PROMPTS, 9)
    assert set(found) >= {8}, "two blocks of four tokens are shared"
    assert is_empty(session)
    if mode == "FULL_DECODE_ONLY":
        keys = {captured.key: captured.num_replays for captured in session.graphs or ()}
        apart = BatchDescriptor(4, 4, uniform=True, cascade=True)
        assert keys[apart] > 0
        assert apart.in_words() == "decode 4, prefix apart"
        assert "decode 4, prefix apart" in str(session.report())


def test_a_request_that_does_not_share_makes_it_plain(model, lengths):
    make, found = lengths
    session = make(model)
    prompts = [*PROMPTS[:3], OTHER]
    assert tokens_of(session.generate(prompts, 4)) == alone(model, prompts, 4)
    found.clear()
    session.generate([*PROMPTS[:2], OTHER], 6)
    assert not found
    session.generate([OTHER, OTHER], 3)
    assert set(found) <= {8}, "the first of nine tokens in whole blocks"


def test_few_requests_or_tokens_do_not_pay(model, lengths, monkeypatch):
    make, found = lengths
    monkeypatch.setattr(shared, "LEAST_REQUESTS", 5)
    make(model).generate(PROMPTS, 4)
    monkeypatch.setattr(shared, "LEAST_REQUESTS", 2)
    monkeypatch.setattr(shared, "LEAST_TOKENS", 4 * 8 + 1)
    make(model).generate(PROMPTS, 4)
    assert not found


def test_verified(model, lengths):
    make, found = lengths
    session = make(model, verify="always")
    assert tokens_of(session.generate(PROMPTS, 6)) == alone(model, PROMPTS, 6)
    assert session.verifier is not None
    assert session.verifier.num_checked > 0
    assert found


def test_without_sharing_nobody_looks(model, monkeypatch):
    session = make_session(model, debug="eager_replay")
    monkeypatch.setattr(session.runner, "shared_prefix", None)
    session.generate(PROMPTS, 3)


def test_layers_with_a_window_are_not_cascaded(lengths):
    """Where some layers have one, the others are: their cache's blocks are of one kind."""
    make, found = lengths
    model = build_model("mistral", sliding_window=8)
    session = make(model)
    assert not session.runner.cascades
    assert tokens_of(session.generate(PROMPTS, 4)) == alone(model, PROMPTS, 4)
    assert not found


def test_random_sessions(model):
    """With interrupts, drafts, preemption, and all kinds of prefixes."""
    alone = results_alone(model)
    for seed in range(50_000, 50_012):
        run_session(model, alone, seed, share_prefixes=True)


def test_a_key_says_so_of_single_tokens_alone():
    with pytest.raises(ValueError, match="cascade must be False but for single tokens, got True"):
        BatchDescriptor(8, 4, uniform=True, cascade=True)
    with pytest.raises(ValueError, match="cascade must be True or False, got 1"):
        BatchDescriptor(4, 4, uniform=True, cascade=1)  # pyright: ignore[reportArgumentType]
