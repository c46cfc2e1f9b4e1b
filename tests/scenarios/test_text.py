"""Sessions with a tokenizer: text in, text out, as it comes, and cut where it stops."""

import copy
import itertools
import json
import pickle
import re

import pytest
import torch

from graphs import AsyncSession, DecodeSession
from tests.kit.models import build_model
from tests.kit.sessions import asynchronous, captured, drafted, is_empty, make_session, tokens_of
from tests.kit.text import small_tokenizer

PROMPTS = ["The quick brown", "one two", '{"name"']


@pytest.fixture(scope="module")
def model():
    size = len(small_tokenizer())
    return build_model("llama", vocab_size=size, eos_token_id=None, bos_token_id=None)


def session_of(model, **options) -> DecodeSession:
    return make_session(model, tokenizer=small_tokenizer(), max_tokens=128, **options)


def decoded(tokens) -> str:
    return small_tokenizer().decode(tokens, skip_special_tokens=True)


def test_text_is_that_of_the_tokens(model):
    session = session_of(model)
    results = session.generate(PROMPTS, 16)
    ids = [small_tokenizer()(text)["input_ids"] for text in PROMPTS]
    assert [r.prompt_token_ids for r in results] == ids
    assert results == session.generate(ids, 16)
    assert [r.text for r in results] == [decoded(r.token_ids) for r in results]
    assert results[:1] == session.generate(PROMPTS[0], 16)
    request = session.add(PROMPTS[0], 3)
    while session.num_unfinished:
        session.step()
    assert session.result(request).token_ids == results[0].token_ids[:3]


@pytest.mark.parametrize("make", [make_session, captured])
@pytest.mark.parametrize("decode_steps", [1, 8])
def test_streams(model, make, decode_steps):
    """Joined they are the whole text; another request's tokens are kept for `step`."""
    options = {"tokenizer": small_tokenizer(), "max_tokens": 128, "decode_steps": decode_steps}
    session = make(model, **options)
    whole = session.generate(PROMPTS, 24)
    other = session.add(PROMPTS[1], 24)
    outputs = list(session.stream(PROMPTS[0], 24))
    assert "".join(output.text for output in outputs) == whole[0].text
    assert [output.token_id for output in outputs] == whole[0].token_ids
    assert outputs[-1].finish_reason == "length"
    seen = []
    while session.num_unfinished:
        seen += [o.token_id for o in session.step() if o.request_id == other]
    assert seen == whole[1].token_ids
    session.discard(other)
    stream = session.stream(PROMPTS[2], 24)
    next(stream)
    stream.close()
    assert not session._requests


@pytest.mark.parametrize("make", [make_session, captured])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(model, make, include):
    session = make(model, tokenizer=small_tokenizer(), max_tokens=128, decode_steps=4)
    for free in session.generate(PROMPTS, 24):
        for begin in range(2, len(free.text) - 3, 5):
            stop = free.text[begin : begin + 3]
            at = free.text.find(stop)
            ends = {"stop": ["never there", stop], "include_stop_str_in_output": include}
            (result,) = session.generate([free.prompt_token_ids], 24, **ends)
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)
            assert result.text == free.text[: at + len(stop) * include]
            assert free.token_ids[: len(result.token_ids)] == result.token_ids
            assert stop in decoded(result.token_ids)
            streamed = session.stream(free.prompt_token_ids, 24, **ends)
            assert "".join(output.text for output in streamed) == result.text


def test_special_tokens_are_stop_strings(model):
    """A token whose text is left out of texts ends a request, too."""
    tokenizer, session = small_tokenizer(), session_of(model)
    (free,) = session.generate(PROMPTS[:1], 24)
    special = tokenizer.convert_ids_to_tokens(free.token_ids[6])
    session.tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    (result,) = session.generate([free.prompt_token_ids], 24, stop=[special])
    assert (result.finish_reason, result.stop_reason) == ("stop", special)
    assert result.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[6]) + 1]


def test_stop_strings_count_behind_min_tokens(model):
    session = session_of(model)
    (free,) = session.generate(PROMPTS[:1], 24)
    stop = free.text[:2]
    (result,) = session.generate(PROMPTS[:1], 24, stop=stop, min_tokens=8)
    assert len(result.token_ids) > 8
    early = decoded(free.token_ids[:8])
    stop = free.text[len(early) - 1 : len(early) + 1]
    (result,) = session.generate(PROMPTS[:1], 24, stop=stop, min_tokens=8)
    assert (result.text, result.stop_reason) == (early[:-1], stop)


def test_stop_token_ids_and_ignore_eos(model):
    session = session_of(model)
    (free,) = session.generate(PROMPTS[:1], 8)
    token = free.token_ids[3]
    (result,) = session.generate(PROMPTS[:1], 8, stop_token_ids=token)
    assert (result.finish_reason, result.stop_reason) == ("stop", token)
    assert result.text == decoded(result.token_ids[:-1])
    (ended,) = session.generate(PROMPTS[:1], 8, eos=token)
    assert (ended.finish_reason, ended.stop_reason) == ("eos", None)
    (ignored,) = session.generate(PROMPTS[:1], 8, eos=token, ignore_eos=True)
    assert ignored == free


def test_texts_to_score_are_continued_as_they_are(model):
    """No token of the tokenizer's own stands between them."""
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.add_special_tokens({"bos_token": "<eos>"})
    from tokenizers.processors import TemplateProcessing

    tokenizer._tokenizer.post_processor = TemplateProcessing("<eos> $A", None, [("<eos>", 0)])
    session = make_session(model, tokenizer=tokenizer, max_tokens=128)
    (score,) = session.score(["one two"], [" three"])
    plain = small_tokenizer()
    assert score.token_ids == plain(" three")["input_ids"]
    assert session.score([[0, *plain("one two")["input_ids"]]], [score.token_ids]) == [score]


def test_a_request_is_one(model):
    session = session_of(model)
    for call in (session.add, lambda *a, **k: next(session.stream(*a, **k))):
        with pytest.raises(ValueError, match="n must be 1, got 2; supported: more with generate"):
            call(PROMPTS[0], 3, n=2)
    assert not session._requests


def test_off_counts_before_the_config(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "min_new_tokens", 6)
    session = session_of(model)
    (free,) = session.generate(PROMPTS[:1], 8, eos=())
    asked = {"eos": free.token_ids[1]}
    assert len(session.generate(PROMPTS[:1], 8, **asked)[0].token_ids) > 5
    assert len(session.generate(PROMPTS[:1], 8, min_tokens=0, **asked)[0].token_ids) <= 2


def test_chat(model):
    session = session_of(model)
    messages = [{"role": "user", "content": "one two"}]
    prompt = "<user>one two\n<assistant>"
    assert session.chat(messages, 8).token_ids == session.generate([prompt], 8)[0].token_ids


def test_bad_words_as_text(model):
    session = session_of(model)
    word = next(w for w in re.findall("[a-z]+", session.generate(PROMPTS[:1], 32)[0].text) if w)
    (result,) = session.generate(PROMPTS[:1], 32, bad_words=[word])
    tokens = small_tokenizer()(word, add_special_tokens=False)["input_ids"]
    found = result.token_ids
    assert all(found[i : i + len(tokens)] != tokens for i in range(len(found)))


def test_structured_outputs(model):
    """Beside requests that ask for none, with log-probabilities."""
    pytest.importorskip("xgrammar")
    session = session_of(model)
    eos = small_tokenizer().eos_token_id
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
        "required": ["ok", "kind"],
    }
    wanted = [
        ({"json": schema}, lambda t: {"ok", "kind"} == json.loads(t).keys()),
        ({"regex": "[ab]{3}-[0-9]+x"}, lambda t: re.fullmatch("[ab]{3}-[0-9]+x", t)),
        ({"choice": ["Yes", "No", "seven"]}, lambda t: t in ("Yes", "No", "seven")),
    ]
    plain = session.generate(PROMPTS, 20, eos=())
    for temperature in (0.0, 1.0):
        requests = [
            session.add(
                PROMPTS[0], 100, structured_outputs=asked, eos=eos, temperature=temperature,
                logprobs=1, logit_bias={eos: 5.0},
            )
            for asked, _ in wanted
        ]  # fmt: skip
        beside = session.add(PROMPTS[1], 20, eos=())
        while session.num_unfinished:
            session.step()
        assert session.result(beside) == plain[1]
        for request, (asked, is_right) in zip(requests, wanted, strict=True):
            result = session.result(request)
            if result.finish_reason == "eos":
                assert is_right(result.text), (asked, result.text)
            else:
                assert "json" in asked or "regex" in asked
            assert all(x.logprob > -torch.inf for d in result.logprobs for x in d.values())
        for request in (*requests, beside):
            session.discard(request)


def test_structured_outputs_with_drafts(model):
    pytest.importorskip("xgrammar")
    session = captured(model, tokenizer=small_tokenizer(), max_tokens=128, num_draft_tokens=3)
    asked = {"structured_outputs": {"choice": ["seven eight", "Yes"]}, "eos": 0}
    (alone,) = session.generate(PROMPTS[:1], 20, **asked)
    request = session.add(PROMPTS[0], 20, **asked)
    drafts = [alone.token_ids[:2], [5, 6, 7], alone.token_ids[-2:]]
    while session.num_unfinished:
        session.verify_draft({request: drafts[0]})
        drafts.append(drafts.pop(0))
    assert session.result(request) == alone
    assert alone.text in ("seven eight", "Yes")


@pytest.mark.parametrize("decode_steps", [1, 8])
def test_grammars_go_on_while_the_model_runs(model, decode_steps):
    """Beside requests without one; some end by eos, and others take their rows."""
    pytest.importorskip("xgrammar")
    asked = [
        {"structured_outputs": {"regex": "(one|two) [0-9]{2,9}"}, "eos": 0},
        {"structured_outputs": {"choice": ["seven eight", "Yes"]}, "eos": 0},
        {},
        {"structured_outputs": {"regex": "[a-z ]*"}, "eos": 0},
        {"bad_words": ["e"]},
    ]
    results = []
    for make, options in ((make_session, {}), (captured, {"decode_steps": decode_steps})):
        session = make(
            model, tokenizer=small_tokenizer(), max_tokens=128, max_batch_size=3, **options
        )
        ids = [session.add("hello", 20, **one) for one in asked]
        while session.num_unfinished:
            session.step()
        results.append([session.result(number) for number in ids])
        ahead = session.loop.num_launches["ahead"]
        assert ahead > session.loop.num_launches["waited"] if options else ahead == 0
    assert results[0] == results[1]
    assert re.fullmatch("(one|two) [0-9]{2,9}", results[0][0].text[:13])
    assert results[0][1].text in ("seven eight", "Yes")


def test_logits_processors(model):
    """Transformers' own, beside a captured request."""
    from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

    session = session_of(model, debug="eager_replay")
    (plain,) = session.generate(PROMPTS[:1], 24)
    processor = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    (result,) = session.generate(PROMPTS[:1], 24, logits_processor=processor)
    whole = [*result.prompt_token_ids, *result.token_ids]
    pairs = list(itertools.pairwise(whole))
    assert len(set(pairs[len(result.prompt_token_ids) :])) == len(result.token_ids) - 1
    assert session.generate(PROMPTS[:1], 24) == [plain]
    with pytest.raises(RuntimeError, match=r"logits_processor must return logits \[1, "):
        session.generate(PROMPTS[:1], 2, logits_processor=lambda ids, logits: logits[0])


def refused_token(ids, logits):
    raise KeyError("mine")


def no_six(ids, logits):
    return logits.index_fill(1, torch.tensor([6]), -torch.inf)


ONLY_FIVE = [*([token] for token in range(382) if token != 5), [5, 5]]
"""Once, of a vocabulary of 382."""

ERRORS = {
    "processor": {"logits_processor": refused_token},
    "processor, nothing left": {"logits_processor": lambda ids, logits: logits - torch.inf},
    "processor and tokens": {"allowed_token_ids": [6], "logits_processor": no_six},
    "processor and min_tokens": {
        "allowed_token_ids": [5, 6], "eos": 5, "min_tokens": 8, "logits_processor": no_six,
    },
    "processor and bad words": {
        "allowed_token_ids": [5], "bad_words": [[5, 5]], "logits_processor": no_six,
    },
    "nothing left by bad words alone": {"bad_words": ONLY_FIVE},
    "nothing left by bad words": {"allowed_token_ids": [5], "bad_words": [[5, 5]]},
    "grammar and tokens": {
        "structured_outputs": {"choice": ["Yes"]}, "eos": 7, "allowed_token_ids": [5],
    },
    "grammar and min_tokens": {
        "structured_outputs": {"choice": ["Yes"]}, "eos": 7, "min_tokens": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_one_request_ends_that_one(model, name, late):
    """Others get the tokens that they get alone, and nothing is left of it."""
    if "grammar" in name:
        pytest.importorskip("xgrammar")
    session = session_of(model, debug="eager_replay", decode_steps=4)
    if late:
        asynchronous(session)
    (alone,) = session.generate(PROMPTS[1:2], 12)
    beside = session.add(PROMPTS[1], 12)
    session.step()
    with pytest.raises(RuntimeError, match=r"request \d+ has ended"):
        session.generate(PROMPTS[:1], 12, **ERRORS[name])
    bad, errors = session.add(PROMPTS[0], 12, **ERRORS[name]), []
    while session.num_unfinished:
        try:
            session.step()
        except RuntimeError as error:
            errors.append(error)
    assert [error.request_id for error in errors] == [bad]
    assert session.result(bad).finish_reason == "error"
    assert session.result(beside) == alone
    session.discard(bad)
    session.discard(beside)
    assert is_empty(session)


NOTHING = {"allowed_token_ids": [5], "bad_words": [[5, 5]]}
"""One token, and none after it."""


@pytest.mark.parametrize("late", [False, True])
def test_an_error_is_told_before_the_end(model, late):
    """By every way that tokens come, for each of several requests."""
    options = {"debug": "eager_replay"} if late else {}
    session = session_of(model, **options)
    if late:
        asynchronous(session)
    ids, reasons, errors = [session.add([3, 4], 9, **NOTHING) for _ in range(3)], [], []
    while session.num_unfinished:
        try:
            reasons += [output.finish_reason for output in session.step()]
        except RuntimeError as error:
            errors.append(error.request_id)
            assert len(errors) > 1 or "error" not in reasons
    assert sorted(errors) == ids
    opened = AsyncSession(session_of(model, **options))
    with pytest.raises(RuntimeError, match="got none after 1 tokens"):
        opened.submit([3, 4], 9, **NOTHING).result(timeout=60)
    opened.close()


def by_drafts(model, draft, new, **asked):
    """Tokens of a request with a draft in each step, which goes on where it does."""
    session = session_of(model, num_draft_tokens=3)
    want = [*draft, *[0] * (new - len(draft))]
    results, _ = drafted(session, [[3, 4]], [want], lambda following: following[:3], **asked)
    return tokens_of(results)[0]


def test_a_processor_sees_no_token_of_a_draft(model):
    """A draft may be wrong, and those of requests without one are padded."""
    seen = set()

    def processor(ids, logits):
        seen.update(ids[0].tolist())
        return logits

    (want,) = tokens_of(session_of(model).generate([[3, 4]], 10))
    for draft in ([], [9, 9, 9], want[:2]):
        assert by_drafts(model, draft, 10, logits_processor=processor) == want
    assert seen == {3, 4, *want[:-1]}


def test_drafts_behind_the_end_of_a_grammar(model):
    pytest.importorskip("xgrammar")
    asked = {"structured_outputs": {"choice": ["Yes"]}, "eos": 0, "ignore_eos": True}
    (alone,) = session_of(model).generate([[3, 4]], 10, **asked)
    tokens = by_drafts(model, alone.token_ids[:2], 10, **asked)
    assert tokens == alone.token_ids


def test_drafts_after_which_nothing_may_follow(model):
    asked = {"allowed_token_ids": [5], "bad_words": [[5, 5, 5]]}
    for run in (
        lambda: session_of(model).generate([[3, 4]], 10, **asked),
        lambda: by_drafts(model, [5, 5, 7], 10, **asked),
    ):
        with pytest.raises(RuntimeError, match="got none after 2 tokens"):
            run()


def test_streams_hand_out_what_others_have_drawn(model):
    session = session_of(model)
    whole = session.generate(PROMPTS[:2], 12)
    first, second = (session.stream(prompt, 12) for prompt in PROMPTS[:2])
    pairs = list(zip(first, second, strict=True))
    assert [[o.token_id for o in column] for column in zip(*pairs, strict=True)] == [
        r.token_ids for r in whole
    ]
    stream = session.stream(PROMPTS[0], 12)
    begun = next(stream)
    session.generate(PROMPTS[1:2], 30)
    rest = list(stream)
    assert [o.token_id for o in (begun, *rest)] == whole[0].token_ids
    assert "".join(o.text for o in (begun, *rest)) == whole[0].text
    for output in session.stream(PROMPTS[0], 12):
        session.discard(output.request_id)
    assert not session._requests


def test_results_can_be_pickled(model):
    pytest.importorskip("xgrammar")
    asked = {"structured_outputs": {"choice": ["Yes"]}, "eos": 0, "logprobs": 1}
    (result,) = session_of(model).generate(PROMPTS[:1], 12, stop="never", **asked)
    copied = pickle.loads(pickle.dumps(result))
    assert copied == result
    for name in ("text", "logprobs", "cumulative_logprob", "stop_reason", "prompt_token_ids"):
        assert getattr(copied, name) == getattr(result, name)


REFUSED = {
    "stop": ({"stop": [""]}, "stop must be a text or a list of texts, got"),
    "min_tokens": ({"min_tokens": -1}, "min_tokens must be an integer from 0"),
    "bias": ({"logit_bias": {10**6: 1.0}}, "logit_bias must be an integer from 0 to"),
    "bias value": ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\] must be a number"),
    "bad words": ({"bad_words": [[]]}, "bad_words must hold token ids"),
    "allowed": ({"allowed_token_ids": [-1]}, "allowed_token_ids must be an integer from 0"),
    "nothing left": (
        {"allowed_token_ids": [3], "bad_words": [[3]]}, "must leave a token that can be drawn",
    ),
    "logprobs": ({"logprobs": 65}, "logprobs must be an integer from 0 to 64"),
    "prompt_logprobs": ({"prompt_logprobs": -1}, "prompt_logprobs must be an integer from 0"),
    "no end but by ends": (
        {"allowed_token_ids": [7], "eos": 7, "min_tokens": 3}, "that does not end a request with",
    ),
    "an empty word": ({"bad_words": [""]}, "bad_words must hold texts, got an empty one"),
    "a large bias": ({"logit_bias": {1: 3e38}}, r"logit_bias\[1\] must be a number in range"),
    "ignore_eos": ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    "processor": ({"logits_processor": 3}, "logits_processor must be callable"),
    "min_tokens with many ends": (
        {"min_tokens": 2, "eos": list(range(9))}, "min_tokens must be 0 with more than 8 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(model, name):
    """Nothing is queued."""
    wanted, message = REFUSED[name]
    session = session_of(model)
    with pytest.raises(ValueError, match=message):
        session.generate(PROMPTS, 4, **wanted)
    assert not session._requests


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.generate([[1]], 2, stop="a"), "stop must come with DecodeSession"),
        (lambda s: s.generate([[1]], 2, bad_words=["a"]), "bad_words of text must come with"),
        (lambda s: s.chat([{"role": "user", "content": "a"}]), "messages must come with"),
    ],
)
def test_text_needs_a_tokenizer(model, call, message):
    session = make_session(model)
    with pytest.raises(ValueError, match=message):
        call(session)
    assert session.generate([[1, 2]], 2)[0].text is None
