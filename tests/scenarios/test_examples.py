"""The programs in examples/ run, and the drafter looks up what it says."""

import asyncio
import random
import shutil

import pytest
import torch

from examples import (
    asyncio_stream,
    chat,
    decode_llama,
    json_output,
    log_probabilities,
    ngram_drafter,
    own_loop,
    rollouts,
)
from graphs import DecodeSession, SessionOptions
from tests.kit.models import build_model, generated
from tests.kit.text import small_tokenizer


@pytest.fixture
def uncompiled(monkeypatch):
    """Compiling is tried elsewhere."""
    monkeypatch.setattr("torch.compile", lambda model, **options: model)


def number_in(text: str, before: str) -> float:
    return float(text.split(before)[1].split()[0])


def test_ngram_drafter(capsys):
    """It asserts itself that drafts change no token; here, that they save steps."""
    ngram_drafter.main()
    out = capsys.readouterr().out
    assert "384 tokens, the same with drafts and without" in out
    assert 0.5 < number_in(out, "accepted tokens per step: ") < 4
    assert number_in(out, "with drafts: ") < number_in(out, "without drafts: ")


def test_decode_llama(uncompiled, capsys):
    decode_llama.main()
    assert capsys.readouterr().out.count("length") == 3


@pytest.mark.parametrize("compiled", [False, True])
def test_own_loop(model, compiled):
    """Its tokens are those of `generate`; on a GPU tests/gpu/test_own_loop.py replays it."""
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8] * 9]
    wanted = [generated(model, prompt, 20, do_sample=False) for prompt in prompts]
    run = torch.compile(model, backend="attn_ops", fullgraph=True) if compiled else model
    assert own_loop.generate(run, prompts, 20) == wanted


def test_rollouts(uncompiled, capsys):
    """Samples get better as the trainer's weights reach the session."""
    rollouts.main()
    out = capsys.readouterr().out
    rewards = [float(line.split("mean reward ")[1][:5]) for line in out.splitlines()[:8]]
    assert rewards[-1] > rewards[0] + 0.1
    differences = [float(line.rsplit(" ", 1)[1]) for line in out.splitlines()[:8]]
    assert max(differences) < 1e-5
    assert "forgotten 8 times" in out


def looked_up(tokens: list[int], longest: int, num_tokens: int) -> list[int]:
    """As `NgramDrafter.draft`, by a search through the whole text."""
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for begin in range(len(tokens) - n - 1, -1, -1):
            if tokens[begin : begin + n] == tokens[-n:]:
                text = tokens[begin + n :]
                return [text[i % len(text)] for i in range(num_tokens)]
    return []


def test_drafts_are_what_followed_the_latest_longest_match():
    generator = random.Random(0)
    for longest in (1, 2, 4):
        drafter = ngram_drafter.NgramDrafter([], longest)
        assert drafter.draft(3) == []
        for _ in range(200):
            drafter.append(generator.randrange(4))
            assert drafter.draft(5) == looked_up(drafter.tokens, longest, 5)


# -- on a folder with a small model and its tokenizer ----------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizer()
    eos = tokenizer.eos_token_id
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    model = build_model("llama", "eager", eos_token_id=eos, **sizes)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def folder(saved, uncompiled):
    return saved


def test_chat(folder):
    first, second = chat.answers(folder, ["one two", "three"])
    assert first
    assert chat.answers(folder, ["one two"]) == [first]
    assert second != first


def test_log_probabilities(folder):
    assert log_probabilities.rollouts(folder, ["The quick", "one two"]) < 1e-4


def test_json_output(folder):
    pytest.importorskip("xgrammar")
    found = json_output.answer(folder, "one two")
    assert found["city"] in ("Paris", "Rome")
    assert isinstance(found["is_capital"], bool)


def test_asyncio_stream(folder):
    texts = asyncio.run(asyncio_stream.main(folder, ["The quick", "one two", "The quick"]))
    assert texts[0] == texts[2] != texts[1]


def test_options_of_a_session_count(folder):
    options = SessionOptions(max_batch_size=3, max_tokens=77, decode_steps=4)
    session = DecodeSession.from_pretrained(folder, options=options)
    assert (session.max_batch_size, session.max_tokens, session.decode_steps) == (3, 77, 4)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"dtype": "foo"}, "dtype must be"),
        ({"device": "foo"}, "device must be"),
        ({"compile": 1}, "compile must be True or False"),
    ],
)
def test_refused(folder, wanted, message):
    with pytest.raises(ValueError, match=message):
        DecodeSession.from_pretrained(folder, **wanted)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="path must be a folder with a model"):
        DecodeSession.from_pretrained(tmp_path)


def test_a_tokenizer_that_does_not_load(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    (broken / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="model must have a tokenizer that loads"):
        DecodeSession.from_pretrained(broken)
    (broken / "tokenizer.json").unlink()
    session = DecodeSession.from_pretrained(broken, max_batch_size=1, max_tokens=32)
    assert session.tokenizer is None
