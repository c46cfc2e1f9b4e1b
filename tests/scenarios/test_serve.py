"""examples/serve.py, asked by OpenAI's client over a socket: answers of the session alone."""

import itertools
import json
import re
import time
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from examples import serve as example  # noqa: E402
from graphs import DecodeSession  # noqa: E402
from graphs.app import presets  # noqa: E402
from graphs.app.prompts import tokenizer_of  # noqa: E402
from tests.fuzz import serve  # noqa: E402
from tests.kit.sessions import is_empty  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).parents[2]
PROMPT = "The quick brown"
MESSAGES = [{"role": "user", "content": "one two"}]


@pytest.fixture(scope="module")
def alone():
    return serve.small_session()


@pytest.fixture(scope="module")
def session():
    return serve.small_session(max_batch_size=4)


@pytest.fixture(scope="module")
def url(session):
    with serve.served(session, max_waiting=16) as url:
        yield url


@pytest.fixture
def client(url, session):
    """Nothing is left in the session after the test."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
    serve.wait_until(lambda: not session._requests)
    assert is_empty(session)


def complete(client, prompt=PROMPT, **asked):
    return client.completions.create(model=serve.NAME, prompt=prompt, **asked)


def chat(client, messages=MESSAGES, **asked):
    return client.chat.completions.create(model=serve.NAME, messages=messages, **asked)


WANTED = [
    {"max_tokens": 24},
    {"max_tokens": 24, "stop": ["a", "o"]},
    {"max_tokens": 24, "temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"max_tokens": 24, "frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"max_tokens": 24, "temperature": 1.2, "seed": -3, "n": 3},
    {"max_tokens": 8, "logit_bias": {70: 50.0}},
    {},
]


def alone_of(alone, asked, prompts=(PROMPT,)):
    own = {name: value for name, value in asked.items() if name != "max_tokens"}
    return alone.generate(list(prompts), asked.get("max_tokens"), **own)


@pytest.mark.parametrize("asked", WANTED)
def test_completions_are_those_of_generate(client, alone, asked):
    results = alone_of(alone, asked)
    answer = complete(client, **asked)
    assert [c.text for c in answer.choices] == [r.text for r in results]
    reasons = {"eos": "stop", "stop": "stop", "length": "length"}
    assert [c.finish_reason for c in answer.choices] == [reasons[r.finish_reason] for r in results]
    assert [c.index for c in answer.choices] == list(range(len(results)))
    assert answer.usage.prompt_tokens == len(results[0].prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(r.token_ids) for r in results)
    texts, reasons_of, usages = joined(complete(client, stream=True, **asked))
    assert texts == {c.index: c.text for c in answer.choices}
    assert reasons_of == {c.index: c.finish_reason for c in answer.choices}
    assert usages == []


def joined(stream):
    """Texts, finish reasons and usages of a stream, by choice."""
    texts, reasons, usages = {}, {}, []
    for part in stream:
        for choice in part.choices:
            assert reasons.get(choice.index) is None
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + piece
            reasons[choice.index] = choice.finish_reason
        usages += [part.usage] if getattr(part, "usage", None) else []
    return texts, reasons, usages


def test_prompts_of_all_kinds(client, alone):
    ids = alone.tokenizer(PROMPT)["input_ids"]
    first, second = (r.text for r in alone.generate([PROMPT, "one two"], 8))
    for prompt, wanted in [
        (ids, [first]),
        ([PROMPT, "one two"], [first, second]),
        ([ids, ids[:2]], [first, alone.generate([ids[:2]], 8)[0].text]),
    ]:
        answer = complete(client, prompt, max_tokens=8)
        assert [c.text for c in answer.choices] == wanted
        assert joined(complete(client, prompt, max_tokens=8, stream=True))[0] == dict(
            enumerate(wanted)
        )


def test_chats_are_those_of_the_session(client, alone):
    wanted = alone.chat(MESSAGES, 24)
    for limit in ("max_tokens", "max_completion_tokens"):
        answer = chat(client, **{limit: 24})
        assert answer.choices[0].message.content == wanted.text
        assert answer.choices[0].message.role == "assistant"
    options = {"include_usage": True}
    parts = list(chat(client, max_tokens=24, stream=True, stream_options=options))
    assert [p.choices[0].delta.role for p in parts[:2]] == ["assistant", None]
    texts, _, usages = joined(parts)
    assert texts == {0: wanted.text}
    assert [u.completion_tokens for u in usages] == [len(wanted.token_ids)]
    assert usages == [answer.usage]


def test_without_a_limit_a_chat_fills_the_session(client, session):
    answer = chat(client, logit_bias={session.tokenizer.eos_token_id: -100})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == session.max_tokens + 1


def close(value):
    return pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("k", [0, 3])
def test_log_probabilities_of_completions(client, alone, k):
    (result,) = alone.generate([PROMPT], 12, logprobs=k)
    found = complete(client, max_tokens=12, logprobs=k).choices[0].logprobs
    drawn = [row[t].logprob for t, row in zip(result.token_ids, result.logprobs, strict=True)]
    assert found.token_logprobs == close(drawn)
    tops = [sorted(x.logprob for x in row.values()) for row in result.logprobs]
    assert [sorted(row.values()) for row in found.top_logprobs] == [close(row) for row in tops]
    names = alone.tokenizer.batch_decode([[t] for t in result.token_ids])
    for name, token, told in zip(names, result.token_ids, found.tokens, strict=True):
        assert told == (f"token_id:{token}" if "\ufffd" in name else name)
    parts = list(complete(client, max_tokens=12, logprobs=k, stream=True))
    rows = [p.choices[0].logprobs for p in parts]
    assert [row.token_logprobs[0] for row in rows] == close(drawn)
    assert [x for row in rows for x in row.text_offset] == found.text_offset
    assert "".join(p.choices[0].text for p in parts) == result.text


@pytest.mark.parametrize("k", [0, 3])
def test_log_probabilities_of_chats(client, alone, k):
    result = alone.chat(MESSAGES, 12, logprobs=k)
    asked = {"max_tokens": 12, "logprobs": True, "top_logprobs": k}
    found = chat(client, **asked).choices[0].logprobs.content
    streamed = [
        p.choices[0].logprobs.content[0] for p in chat(client, stream=True, **asked) if p.choices
    ]
    for token, row, one in zip(result.token_ids, result.logprobs, found, strict=True):
        assert one.logprob == close(row[token].logprob)
        likely = sorted((x.logprob for x in row.values()), reverse=True)[:k]
        assert [x.logprob for x in one.top_logprobs] == close(likely)
        assert one.bytes is None or bytes(one.bytes).decode() == one.token
    assert [one.logprob for one in streamed] == close([one.logprob for one in found])


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


def test_json_output(client):
    pytest.importorskip("xgrammar")
    named = {"name": "city", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": named}
    found = json.loads(chat(client, response_format=form).choices[0].message.content)
    assert found["city"] in ("Paris", "Rome")
    asked = {"response_format": {"type": "json_object"}, "temperature": 0.5, "seed": 1}
    text = chat(client, max_tokens=200, **asked).choices[0].message.content
    assert text.startswith("{")
    assert chat(client, response_format={"type": "text"}, max_tokens=4).choices


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": -1}, "temperature must be a number in range, got -1"),
        ({"n": 0}, "n must be from 1 to 128"),
        ({"n": "two"}, "n must be from 1 to 128"),
        ({"seed": "x", "n": 2}, "body must be"),
        ({"stop": [3]}, "stop must be"),
        ({"logit_bias": {"fox": 1}}, "fox"),
        ({"suffix": "fox"}, "got suffix"),
        ({"extra_body": {"fox": 1}}, "got fox"),
        ({"extra_body": {"self": 1}}, "'self'"),
        ({"prompt": [9999]}, "prompt must hold token ids"),
        ({"prompt": "fox " * 400}, "prompt must be at most max_tokens=256 long"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, "structured_outputs must be"),
        ({"extra_body": {"stream_options": 3}}, "body must be"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(client, asked, message, stream):
    """By the server or by the session, which tells of each argument; see tests/graphs."""
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as found:
        complete(client, **({"stream": stream} | asked))
    assert found.value.type == "invalid_request_error"


def test_chats_that_are_refused(client):
    for asked in ({"top_logprobs": 3}, {"tools": [{"type": "function"}]}, {"messages": "hello"}):
        with pytest.raises(openai.BadRequestError):
            chat(client, **asked)
    with pytest.raises(openai.BadRequestError, match="JSONDecodeError"):
        client.post("/completions", content=b"{", cast_to=object)


def test_content_in_parts(client):
    """Of text alone, which is joined."""
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    found = [
        chat(client, [{"role": "user", "content": x}], max_tokens=8) for x in (parts, "one two")
    ]
    assert found[0].usage == found[1].usage
    assert found[0].choices == found[1].choices
    with pytest.raises(openai.BadRequestError, match="content must be text"):
        chat(client, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_models(client):
    assert [model.id for model in client.models.list()] == [serve.NAME]
    with pytest.raises(openai.NotFoundError, match="model must be small, got fox"):
        client.completions.create(model="fox", prompt=PROMPT)
    root = str(client.base_url).removesuffix("v1/")
    assert client.get(f"{root}health", cast_to=object) == {"status": "ok"}


LONG = {"max_tokens": 200, "logit_bias": {0: -100.0}}  # 0 is eos


@pytest.fixture
def slow_steps(session, monkeypatch):
    """Steps of 50 ms; a call says how many there were meanwhile, until nothing is left."""
    step, num = session.loop.step, itertools.count()

    def slower():
        next(num)
        time.sleep(0.05)
        step()

    def steps_until_empty():
        begin = next(num)
        serve.wait_until(lambda: not session._requests)
        assert is_empty(session)
        return next(num) - begin - 1

    monkeypatch.setattr(session.loop, "step", slower)
    return steps_until_empty


def test_a_stream_that_is_left_is_aborted(client, slow_steps):
    stream = complete(client, stream=True, n=2, **LONG)
    assert len([*itertools.islice(stream, 3)]) == 3
    stream.close()
    assert slow_steps() <= 2


@pytest.mark.parametrize("n", [2, 12])  # 12: eight of them wait
def test_an_answer_that_nobody_awaits_is_aborted(client, session, slow_steps, n):
    with pytest.raises(openai.APITimeoutError):
        complete(client, n=n, timeout=0.5, **LONG)
    assert slow_steps() <= 2


def test_a_client_that_does_not_read(url, session, slow_steps):
    """Tokens wait for it, and others go on."""
    with (
        openai.OpenAI(base_url=url, api_key="none") as idle,
        openai.OpenAI(base_url=url, api_key="none") as client,
    ):
        stream = complete(idle, stream=True, n=3, **LONG)
        assert complete(client, max_tokens=2).usage.completion_tokens == 2
        assert len(session._requests) == 3
        stream.close()
    assert slow_steps() <= 2


def test_an_error_behind_the_first_token(client, session, monkeypatch):
    """It is the last event, and the server goes on."""
    step, num = session.loop.step, itertools.count()

    def failing():
        if next(num) == 5:
            raise RuntimeError("the step has failed")
        step()

    monkeypatch.setattr(session.loop, "step", failing)
    with pytest.raises(openai.APIError, match="the step has failed"):
        list(complete(client, stream=True, **LONG))
    assert complete(client, max_tokens=4).choices


def test_the_connection_stays_after_an_error(client):
    """One in which the next request comes, as the error is an answer like others."""
    for _ in range(3):
        with pytest.raises(openai.InternalServerError):
            complete(client, extra_body={"allowed_token_ids": [5], "bad_words": [[5, 5]]})
        assert complete(client, max_tokens=1).choices


def test_a_full_queue(client, session, url):
    """More choices than may wait: all are refused, and those that were queued are gone."""
    with pytest.raises(openai.RateLimitError, match="max_waiting=16 requests wait already"):
        complete(client, n=40, **LONG)

    def answers() -> bool:
        try:
            return bool(complete(client, max_tokens=1).choices)
        except openai.RateLimitError:  # those that were queued are on their way out
            return False

    serve.wait_until(answers)


def test_the_page_s_client(client, alone, capsys):
    """docs/serving.md, with this server's address."""
    page = (ROOT / "docs" / "serving.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    exec(program.replace("http://127.0.0.1:8000/v1", str(client.base_url)), {})
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    wanted = alone.chat(messages, 24).text, alone.generate(["The sea"], 24)[0].text
    assert capsys.readouterr().out == "\n".join(wanted)


def test_clients_that_hang_up():
    """A soak of some seconds; `python -m tests.fuzz serve` is one of minutes."""
    made = serve.small_session()
    cases = serve.Cases(made, 20)
    with serve.served(made, max_waiting=120) as url:
        assert serve.run(url, made, cases, 0, each=1) == "right"


def test_the_command(tmp_path, monkeypatch):
    """Its options, and a name for the model; neither compiled nor served here."""
    made = serve.small_session()
    made.original.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    ran = []
    monkeypatch.setattr("torch.compile", lambda model, **options: model)
    monkeypatch.setattr("uvicorn.run", lambda app, **options: ran.append((app, options)))
    example.main(str(tmp_path), port=1234, max_batch_size=2, max_tokens=64, max_waiting=3)
    ((app, options),) = ran
    assert options == {"host": "127.0.0.1", "port": 1234}
    paths = {route.path for route in app.routes}
    assert {"/health", "/v1/models", "/v1/completions", "/v1/chat/completions"} <= paths
    assert len((ROOT / "examples" / "serve.py").read_text().splitlines()) <= 150


@pytest.mark.slow
def test_a_trained_model(smollm2):
    """An answer that one can read, and log-probabilities that say how sure it is."""
    model, tokenizer = presets.load(smollm2), tokenizer_of(smollm2)
    sizes = {"max_batch_size": 2, "max_tokens": 128, "cudagraph_mode": "NONE"}
    session = DecodeSession(model, tokenizer=tokenizer, **sizes)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with serve.served(session) as url, openai.OpenAI(base_url=url, api_key="none") as client:
        answer = chat(client, question, max_tokens=24, logprobs=True, top_logprobs=2).choices[0]
    assert "Paris" in answer.message.content
    (paris,) = [one for one in answer.logprobs.content if one.token.strip() == "Paris"][:1]
    assert paris.logprob > -0.5
