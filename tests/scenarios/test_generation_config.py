"""Requests take their end and their sampling from the model's generation config, as `generate`."""

import pytest

from graphs.requests.defaults import IDLE, REFUSED, TAKEN
from tests.fuzz.configs import VALUES, search
from tests.kit.models import build_model, generated
from tests.kit.sessions import (
    PROMPTS,
    captured_lazily,
    make_session,
    poisoned,
    tokens_of,
    uncaptured,
)

SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 9, "top_p": 0.9}


@pytest.fixture
def configured():
    """A model and what sets its generation config."""
    model = build_model()

    def configure(**fields):
        for name, value in fields.items():
            setattr(model.generation_config, name, value)
        return model

    return configure


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("make", [make_session, captured_lazily])
def test_eos_of_the_config_ends_requests(configured, make, several):
    model = configured()
    free = tokens_of(make_session(model).generate(PROMPTS, 12))
    eos = [free[0][4], free[1][2]] if several else free[0][4]
    configured(eos_token_id=eos)
    results = poisoned(make(model)).generate(PROMPTS, 12)
    assert tokens_of(results) == [generated(model, p, 12) for p in PROMPTS] != free
    assert results[0].finish_reason == "eos"


@pytest.mark.parametrize("name", ["eos", "eos_token_id"])
def test_keywords_come_before_the_config(configured, name):
    session = make_session(configured())
    (free,) = session.generate(PROMPTS[:1], 8)
    configured(eos_token_id=free.token_ids[0])
    assert session.generate(PROMPTS[:1], 8, **{name: ()}) == [free]
    (other,) = session.generate(PROMPTS[:1], 8, **{name: [free.token_ids[3]]})
    first = free.token_ids.index(free.token_ids[3])
    assert (other.token_ids, other.finish_reason) == (free.token_ids[: first + 1], "eos")
    (ended,) = session.generate(PROMPTS[:1], 8, **{name: None})
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[:1], "eos")


def test_both_names_of_eos(model):
    session = make_session(model)
    assert session.generate([[1]], 3, eos=5, eos_token_id=[5]) == session.generate([[1]], 3, eos=5)
    with pytest.raises(ValueError, match=r"^eos and eos_token_id must be .* \[5\] and \[6, 7\]$"):
        session.add([1], 3, eos=5, eos_token_id=[7, 6])
    with pytest.raises(ValueError, match=r"^eos_token_id must hold token ids from 0"):
        session.add([1], 3, eos_token_id=64)
    assert session.num_unfinished == 0


@pytest.mark.parametrize("eos", [64, -1, [64, 151643]])
def test_eos_outside_the_vocabulary_ends_nothing(configured, eos):
    (result,) = make_session(configured(eos_token_id=eos)).generate(PROMPTS[:1], 4)
    assert result.finish_reason == "length"


def test_a_model_without_generation_config(configured):
    model = configured()
    model.generation_config = None
    assert make_session(model).generate([[1]], 2)[0].finish_reason == "length"


# -- finish reasons --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [uncaptured, captured_lazily])
def test_finish_reasons_are_told_apart(configured, make):
    session = make(configured(), max_tokens=64)
    prompt = list(range(60))
    (free,) = session.generate([prompt], 5, eos=())
    assert len(free.token_ids) == 5  # the last one is never in the cache
    assert free.finish_reason == "length"
    (full,) = session.generate([prompt], 50, eos=())
    assert (full.token_ids, full.finish_reason) == (free.token_ids, "max_tokens")
    first = free.token_ids[0]
    (stopped,) = session.generate([prompt], 50, eos=(), stop_token_ids=first)
    assert (stopped.token_ids, stopped.finish_reason) == ([first], "stop")
    (ended,) = session.generate([prompt], 50, eos=first, stop_token_ids=[first, 3])
    assert (ended.token_ids, ended.finish_reason) == ([first], "eos")
    session.add(prompt, 50, eos=())
    outputs = []
    while session.num_unfinished:
        outputs += session.step()
    assert [o.finish_reason for o in outputs] == [None] * 4 + ["max_tokens"]


def test_stop_tokens_end_requests_beside_eos(model):
    session = make_session(model)
    (free,) = session.generate(PROMPTS[:1], 8)
    eos, stop = free.token_ids[6], free.token_ids[2]
    (result,) = session.generate(PROMPTS[:1], 8, eos=eos, stop_token_ids={stop})
    end = min(free.token_ids.index(eos), free.token_ids.index(stop))
    assert result.token_ids == free.token_ids[: end + 1]


# -- sampling --------------------------------------------------------------------------------------


def test_sampling_of_the_config(configured):
    session = make_session(configured(**SAMPLED))
    asked = {name: value for name, value in SAMPLED.items() if name != "do_sample"}
    got = session.generate(PROMPTS, 8, seed=3)
    assert got != session.generate(PROMPTS, 8, seed=4)
    assert session.generate(PROMPTS, 8, seed=3, top_k=0) != got
    greedy = session.generate(PROMPTS, 8, temperature=0)
    configured(do_sample=False)
    assert session.generate(PROMPTS, 8) == greedy
    assert session.generate(PROMPTS, 8, seed=3, **asked) == got


def test_what_the_config_only_samples_with(configured):
    session = make_session(configured(do_sample=True))
    got = session.generate(PROMPTS, 8, seed=3)
    assert got == session.generate(PROMPTS, 8, seed=3, temperature=1.0, top_k=50)
    assert got != session.generate(PROMPTS, 8, seed=3, temperature=2.0)
    assert got != session.generate(PROMPTS, 8, temperature=0)


def test_bad_words_of_the_config_leave_eos(configured):
    """As `generate` has it; a request's own forbid it."""
    (free,) = make_session(configured()).generate(PROMPTS[:1], 12)
    eos, other = free.token_ids[4], free.token_ids[1]
    model = configured(eos_token_id=eos, bad_words_ids=[[eos], [other, 5]])
    session = make_session(model)
    (got,) = session.generate(PROMPTS[:1], 12)
    assert got.token_ids == generated(model, PROMPTS[0], 12)
    assert got.token_ids[-1] == eos
    assert eos not in session.generate(PROMPTS[:1], 12, bad_words=[[eos]])[0].token_ids


def test_a_text_is_no_list_of_bad_words(configured):
    session = make_session(configured(suppress_tokens=[1]))
    with pytest.raises(ValueError, match=r"^bad_words must be a list of texts .* got 'ab'"):
        session.generate(PROMPTS, 4, bad_words="ab")


def test_a_repetition_penalty_of_the_config(configured):
    model = configured(repetition_penalty=1.7)
    session = make_session(model)
    got = tokens_of(session.generate(PROMPTS, 12))
    assert got == [generated(model, p, 12) for p in PROMPTS]
    assert got != tokens_of(session.generate(PROMPTS, 12, repetition_penalty=1.0))


# -- every field -----------------------------------------------------------------------------------


def test_every_field_of_transformers_is_listed_once():
    transformers = pytest.importorskip("transformers")
    known = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    listed = [*TAKEN, *REFUSED, *(name for names in IDLE.values() for name in names)]
    assert len(listed) == len(set(listed))
    assert known <= set(listed)
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
        assert known == set(listed)


def test_what_a_session_does_not_do_is_refused_by_name(configured):
    transformers = pytest.importorskip("transformers")
    session = make_session(configured())
    for name, neutral in REFUSED.items():
        asks = [value for value in VALUES[name] if value not in neutral]
        assert asks
        for value in [*asks, *neutral]:
            session.model.generation_config = config = transformers.GenerationConfig()
            setattr(config, name, value)
            if value in neutral:
                assert len(session.generate([[1]], 1)) == 1
                continue
            with pytest.raises(ValueError, match=rf"^generation_config\.{name} must .* = None gen"):
                session.add([1], 1)
    assert session.num_unfinished == 0


def test_filters_count_for_requests_that_draw_by_themselves(configured):
    model = configured(top_k=1)  # without do_sample
    session = make_session(model)
    greedy, drawn, free = (
        tokens_of(session.generate(PROMPTS, 8, **own))
        for own in ({}, {"temperature": 5.0}, {"temperature": 5.0, "top_k": 0})
    )
    assert greedy == drawn != free
    model.generation_config.typical_p = 0.5
    with pytest.raises(ValueError, match=r"^generation_config\.typical_p must be neutral"):
        session.add([1], 1, temperature=1.0)
    model.generation_config = {"top_k": 1}
    with pytest.raises(ValueError, match=r"^generation_config must be a GenerationConfig"):
        session.add([1], 1)


def test_fields_of_a_newer_transformers(configured):
    transformers = pytest.importorskip("transformers")

    class Newer(transformers.GenerationConfig):
        def __init__(self, **kwargs):
            self.newest_penalty = kwargs.pop("newest_penalty", None)
            super().__init__(**kwargs)

    session = make_session(configured())
    session.model.generation_config = Newer(chat_format="generate reads no such field")
    assert len(session.generate([[1]], 1)) == 1
    session.model.generation_config.newest_penalty = 2.0
    with pytest.raises(ValueError, match=r"^generation_config\.newest_penalty must .*got 2\.0"):
        session.add([1], 1)


BAD = {
    "eos_token_id": ("</s>", {"eos": 5}),
    "top_p": (0.0, {"top_p": 0.5}),
    "temperature": (-1.0, {"temperature": 0.0}),
    "repetition_penalty": (float("nan"), {"repetition_penalty": 1.0}),
    "max_new_tokens": (0, {"max_new_tokens": 2}),
    "max_length": (3, {"max_new_tokens": 2}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_name_the_config(configured, name):
    value, own = BAD[name]
    session = make_session(configured(do_sample=True, **{name: value}))
    message = (
        rf"^generation_config\.{name} must .*got '?{value}.*; an argument of the request comes"
    )
    with pytest.raises(ValueError, match=message):
        session.add([1, 2, 3])
    assert session.num_unfinished == 0
    assert len(session.generate([[1, 2, 3]], **own)) == 1


@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.long)])
def test_random_configs(number):
    run = search()
    outcomes = [run(seed) for seed in range(number)]
    assert outcomes.count("equal") > number / 4
