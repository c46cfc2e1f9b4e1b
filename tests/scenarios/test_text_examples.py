"""The short programs of examples/, on a folder with a small model and its tokenizer."""

import asyncio
import shutil
import subprocess
import sys

import pytest

from examples import asyncio_stream, chat, json_output, log_probabilities
from graphs import DecodeSession, SessionOptions
from tests.kit.models import build_model
from tests.kit.text import small_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizer()
    eos = tokenizer.eos_token_id
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    model = build_model("llama", "eager", eos_token_id=eos, **sizes)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """As with `compile=False`: compiling is not what is tried here."""
    monkeypatch.setattr("torch.compile", lambda model, **options: model)


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


PROGRAM = """
import sys
from graphs import DecodeSession
session = DecodeSession.from_pretrained(sys.argv[1], max_batch_size=2, max_tokens=64, compile=False)
print(session.generate(["Hello"], 4)[0].text)
"""


@pytest.mark.slow
def test_a_process_that_has_imported_nothing_else(folder):
    """`from_pretrained` registers what Transformers must know."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip()


def test_a_tokenizer_that_does_not_load(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    (broken / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="model must have a tokenizer that loads"):
        DecodeSession.from_pretrained(broken)
    (broken / "tokenizer.json").unlink()
    session = DecodeSession.from_pretrained(broken, max_batch_size=1, max_tokens=32)
    assert session.tokenizer is None
