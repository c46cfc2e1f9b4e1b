"""Sessions whose requests share prefixes: the tokens of sessions without, and fewer computed."""

# pyright: reportOptionalMemberAccess=false
import pytest
import torch

from tests.kit.models import build_model
from tests.kit.sessions import (
    captured_lazily,
    drafted,
    drain,
    is_empty,
    make_session,
    poisoned,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM = [5, 9, 33, 60, 2, 41, 17, 8, 8, 21, 50]
PROMPTS = [SYSTEM + rest for rest in ([1], [2, 3], [], [1, 4, 4, 7, 30], [1], [2, 3, 5])]
DRAWN = {"temperature": 1.0, "seed": 3}
PENALIZED = DRAWN | {"presence_penalty": 0.5}
FAMILIES = ("mistral", "gemma2", "gpt_oss", "deepseek_v2", "gemma3n")


def sharing(model, make=make_session, **options):
    return poisoned(make(model, share_prefixes=True, **options))


def count_tokens(session, run):
    """What `run` returns, and how many tokens its called steps compute."""
    sizes = []
    with session.observe_logits(lambda step, _: sizes.extend(s.num_tokens for s in step)):
        return run(), sum(sizes)


@pytest.mark.parametrize("max_tokens_per_step", [3, 16, 1000])
@pytest.mark.parametrize("sampling", [{}, PENALIZED], ids=["greedy", "penalized"])
def test_tokens_are_those_without_sharing(model, max_tokens_per_step, sampling):
    options = {"max_tokens_per_step": max_tokens_per_step}
    want = make_session(model, **options).generate(PROMPTS, 9, **sampling)
    session = sharing(model, **options)
    assert session.generate(PROMPTS, 9, **sampling) == want
    assert session.generate(PROMPTS, 9, **sampling) == want
    counts = session.report().prefixes
    assert counts.num_hits >= 10
    assert counts.num_shared_tokens > counts.num_prompt_tokens * 0.7
    assert is_empty(session)
    assert "prompt tokens were found, by" in " ".join(str(session.report()).split())


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    model = build_model(name)
    want = make_session(model).generate(PROMPTS, 6)
    session = sharing(model)
    assert session.generate(PROMPTS, 6) == want
    assert session.generate(PROMPTS, 6) == want
    assert session.report().prefixes.num_hits >= 10


@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": "fp8_e4m3"}, {"cache_layout": "HND"}], ids=str
)
def test_caches(model, options):
    want = make_session(model, **options).generate(PROMPTS, 6)
    session = sharing(model, **options)
    assert session.generate(PROMPTS, 6) == want
    assert session.generate(PROMPTS, 6) == want


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_captured(model, decode_steps, mode):
    options = {"decode_steps": decode_steps, "cudagraph_mode": mode, "max_batch_size": 3}
    want = captured_lazily(model, **options).generate(PROMPTS, 9, **DRAWN)
    session = sharing(model, captured_lazily, **options)
    assert session.generate(PROMPTS, 9, **DRAWN) == want
    assert session.generate(PROMPTS, 9, **DRAWN) == want
    assert session.report().prefixes.num_hits >= 8
    assert is_empty(session)


def test_a_computed_prompt_costs_one_token(model):
    session = sharing(model)
    (first,), computed = count_tokens(session, lambda: session.generate([SYSTEM], 1))
    assert computed == len(SYSTEM)
    (second,), computed = count_tokens(session, lambda: session.generate([SYSTEM], 1))
    assert (second, computed) == (first, 1)


def test_a_request_may_opt_out(model):
    session = sharing(model)
    (first,) = session.generate([SYSTEM], 1)
    run = lambda: session.generate([SYSTEM], 1, share_prefix=False)  # noqa: E731
    assert count_tokens(session, run) == ([first], len(SYSTEM))


def test_samples_of_one_prompt(model):
    apart = make_session(model, max_batch_size=8)
    ids = [apart.add(SYSTEM, 6, temperature=1.0, seed=3 + i) for i in range(8)]
    drain(apart)
    session = sharing(model, max_batch_size=8)
    results = session.generate([SYSTEM], 6, n=8, **DRAWN)
    assert results == [apart.result(i) for i in ids]
    assert len({tuple(tokens) for tokens in tokens_of(results)}) > 4
    counts = session.report().prefixes
    assert counts.num_shared_tokens == 7 * (len(SYSTEM) - 1)
    two = session.generate([SYSTEM, SYSTEM[:3]], 6, n=2, **DRAWN)
    assert two[:2] == results[:2]
    assert two[2] != two[3]


def test_samples_without_a_seed_differ(model):
    results = make_session(model).generate([SYSTEM], 6, n=4, temperature=1.5)
    assert len({tuple(tokens) for tokens in tokens_of(results)}) == 4


def test_seeds_of_samples_go_round(model):
    session = make_session(model)
    results = session.generate([[1]], 5, n=2, temperature=1.0, seed=2**63 - 1)
    assert session.generate([[1]], 5, temperature=1.0, seed=-(2**63)) == results[1:]


def test_drafts(model):
    want = make_session(model).generate(PROMPTS, 8)
    session = sharing(model, num_draft_tokens=2)
    session.generate(PROMPTS[:1], 3)
    results, _ = drafted(session, PROMPTS, tokens_of(want), lambda rest: [*rest, 1, 2][:2])
    assert results == want
    assert is_empty(session)


def test_a_small_cache_evicts(model):
    options = {"cache_tokens": 40, "max_batch_size": 2}
    prompts = [[first, *SYSTEM] for first in (1, 2, 3, 1, 4, 2)]
    want = make_session(model, **options).generate(prompts, 6)
    session = sharing(model, **options)
    for _ in range(2):
        assert session.generate(prompts, 6) == want
    assert session.report().prefixes.num_evicted > 0
    assert is_empty(session)


# -- what changes the content ----------------------------------------------------------------------


CHANGES = {
    "counted": lambda m: m.model.layers[0].self_attn.k_proj.weight.mul_(-1),
    "not counted": lambda m: m.model.layers[0].self_attn.k_proj.weight.data.mul_(-1),
}
"""By torch; of others see tests/graphs/verify/test_weight_versions.py."""


@pytest.mark.parametrize("make", [make_session, captured_lazily])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_forgets(make, change):
    model = build_model()
    session = sharing(model, make)
    before = session.generate(PROMPTS, 6)
    running = session.add(PROMPTS[0], 30)
    session.step()
    with torch.no_grad():
        CHANGES[change](model)
    session.discard(running)
    want = make_session(model).generate(PROMPTS, 6)
    assert want != before
    assert session.generate(PROMPTS, 6) == want
    assert session.report().prefixes.num_forgotten >= 1


def test_weights_that_come_back_after_prefixes_were_forgotten():
    """Both writes are none that torch counts; the second is told by values alone."""
    model = build_model()
    session, weight = sharing(model), model.model.layers[0].self_attn.k_proj.weight
    before = make_session(model).generate(PROMPTS, 6)
    running = session.add(PROMPTS[0], 30)
    session.step()
    weight.data.mul_(-1)
    session.forget_prefixes()
    session.generate(PROMPTS, 6)
    session.discard(running)
    weight.data.mul_(-1)
    assert session.generate(PROMPTS, 6) == before


@pytest.mark.parametrize(
    "arguments", [{"n": 0}, {"n": True}, {"n": 1.5}, {"share_prefix": 1}], ids=str
)
def test_bad_arguments(model, arguments):
    session = make_session(model)
    (name,) = arguments
    with pytest.raises(ValueError, match=f"^{name} must be "):
        session.generate([[1]], 3, **arguments)
    with pytest.raises(ValueError, match=r"^share_prefixes must be True or False, got 1$"):
        make_session(model, share_prefixes=1)
    assert session.num_unfinished == 0
