"""Requests that share a prefix: attention reads it once, and the tokens stay what they were."""

import numpy as np
import pytest

from graphs import BatchDescriptor
from graphs.capture.verifier import VerificationError
from graphs.step import shared
from tests.fuzz.sessions import results_alone, run_session
from tests.kit.models import build_model
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
    monkeypatch.setattr(shared, "LEAST_BYTES", 1)


@pytest.fixture
def lengths(monkeypatch):
    """What is shared in the steps whose metadata is made for a cascade."""
    found = []
    session_of = make_session

    def make(model, **options):
        session = session_of(model, **({"share_prefixes": True, "debug": "eager_replay"} | options))
        build = session.builder.build_cascade

        def watched(common, shared_lens, group_starts):
            found.append((shared_lens.tolist(), group_starts.tolist()))
            return build(common, shared_lens, group_starts)

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
    assert [8, 8, 8, 8] in [lens for lens, _ in found], "two blocks of four tokens are shared"
    assert is_empty(session)
    if mode == "FULL_DECODE_ONLY":
        keys = {captured.key: captured.num_replays for captured in session.graphs or ()}
        apart = BatchDescriptor(4, 4, uniform=True, groups=2)
        assert keys[apart] > 0
        assert apart.in_words() == "decode 4, up to 2 prefixes apart"
        assert apart.in_words() in str(session.report())


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE"])
def test_decodes_in_graphs_of_mixed_steps(model, lengths, mode):
    """More than the sizes of decodes: the request of padding has several rows."""
    make, found = lengths
    session = make(model, cudagraph_mode=mode, capture_sizes=[1, 2])
    assert tokens_of(session.generate(PROMPTS, 9)) == alone(model, PROMPTS, 9)
    assert all(len(lens) <= 2 for lens, _ in found)
    assert is_empty(session)


def test_groups_of_neighbours(model, lengths):
    """Requests that share nothing stand between groups; the cache has all prefixes."""
    make, found = lengths
    session = make(model, max_batch_size=8)
    prompts = [*PROMPTS[:2], [8], [9], *[[*OTHER, i] for i in range(3)]]
    for _ in range(2):
        assert tokens_of(session.generate(prompts, 7)) == alone(model, prompts, 7)
    wanted = [8, 8, 0, 0, 8, 8, 8], [0, 2, 4, 7]
    assert any((lens[:7], starts[:4]) == wanted for lens, starts in found)


def test_samples_of_prompts_are_neighbours(model, lengths):
    """The first of each too, which has computed what the others share."""
    make, found = lengths
    session = make(model, max_batch_size=8)
    prompts = [[*PREFIX, 1], [*OTHER, 2]]
    want = [one for one in alone(model, prompts, 7) for _ in range(3)]
    assert tokens_of(session.generate(prompts, 7, n=3)) == want
    assert any(lens[:6] == [8] * 6 and starts[:3] == [0, 3, 6] for lens, starts in found)


def test_one_request_alone_shares_nothing(model, lengths):
    make, found = lengths
    make(model).generate([PROMPTS[0], OTHER, [5], [6, 7]], 5)
    assert not found


def test_few_requests_or_tokens_do_not_pay(model, lengths, monkeypatch):
    make, found = lengths
    monkeypatch.setattr(shared, "LEAST_REQUESTS", 5)
    make(model).generate(PROMPTS, 4)
    monkeypatch.setattr(shared, "LEAST_REQUESTS", 2)
    monkeypatch.setattr(shared, "LEAST_BYTES", 3 * 8 * 2 * 2 * 16 * 4 + 1)  # K, 2, H, float32
    make(model).generate(PROMPTS, 4)
    assert not found


def test_verified(model, lengths):
    make, found = lengths
    session = make(model, verify="always")
    assert tokens_of(session.generate(PROMPTS, 6)) == alone(model, PROMPTS, 6)
    assert session.verifier is not None
    assert session.verifier.num_checked > 0
    assert found


def test_verification_finds_a_wrong_group(model, lengths, monkeypatch):
    """The call that a replay is compared with reads every request's own keys."""
    make, found = lengths
    session = make(model, verify="always")
    wrong = shared.SharedPrefixes(np.array([0, 2]), np.array([8, 8]))
    groups = {2: wrong}  # of decodes
    monkeypatch.setattr(session.runner, "shared_prefixes", lambda s: groups.get(s.num_tokens))
    with pytest.raises(VerificationError, match="differing by"):
        session.generate([PROMPTS[0], [9] * 11], 4)
    assert found


def test_without_sharing_nobody_looks(model, monkeypatch):
    session = make_session(model, debug="eager_replay")
    monkeypatch.setattr(session.runner, "shared_prefixes", None)
    session.generate(PROMPTS, 3)


def test_layers_with_a_window_are_not_cascaded(lengths):
    """Where some layers have one, the others are: their cache's blocks are of one kind."""
    make, found = lengths
    model = build_model("mistral", sliding_window=8)
    session = make(model)
    assert not session.runner.cascades
    assert tokens_of(session.generate(PROMPTS, 4)) == alone(model, PROMPTS, 4)
    assert not found


@pytest.mark.slow
def test_random_sessions(model):
    """With drafts, preemption, and all kinds of prefixes."""
    alone = results_alone(model)
    for seed in range(50_000, 50_012):
        run_session(model, alone, seed, share_prefixes=True)


def test_a_key_says_so_of_single_tokens_alone():
    with pytest.raises(ValueError, match="groups must be 0 but for single tokens, got 2"):
        BatchDescriptor(8, 4, uniform=True, groups=2)
    with pytest.raises(ValueError, match="groups must be an int of at least 0, got -1"):
        BatchDescriptor(4, 4, uniform=True, groups=-1)


@pytest.mark.parametrize(
    ("common", "level", "want"),
    [
        ([2, 2, 2], 1, (6, [0, 4], [2, 2, 2, 2])),
        ([5, 1, 5], 1, (3, [0, 4], [1, 1, 1, 1])),
        ([5, 1, 5], 5, (10, [0, 2, 4], [5, 5, 5, 5])),
        ([0, 0, 3], 3, (3, [0, 2, 4], [0, 0, 3, 3])),
        ([4, 0, 0], 4, (4, [0, 2, 4], [4, 4, 0, 0])),
        ([4, 0, 0, 0, 7], 4, (11, [0, 2, 4, 6], [4, 4, 0, 0, 7, 7])),
    ],
)
def test_groups(common, level, want):
    """The same for all requests of a group, and those without in one."""
    saved, starts, lens = shared._groups(np.array(common), level)
    assert (saved, starts.tolist(), lens.tolist()) == want
