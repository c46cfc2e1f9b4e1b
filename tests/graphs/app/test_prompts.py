"""Prompts files: token ids or text, and errors with path and line."""

import pytest

from graphs.app.prompts import read_prompts, tokenizer_of


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.txt"
    return lambda text: (path.write_text(text, encoding="utf-8"), path)[1]


def letters(text: str) -> dict:
    """A tokenizer whose ids are those of the letters; spaces are dropped."""
    return {"input_ids": [ord(letter) for letter in text if letter != " "]}


def test_token_ids(file):
    prompts = read_prompts(file("\ufeff1 2 3\n\n[4, 5, 6, 7]\r\n"), None, 8)
    assert prompts.token_ids == [[1, 2, 3], [4, 5, 6, 7]]
    assert prompts.texts == [None, None]


def test_text_with_a_tokenizer(file, tmp_path):
    prompts = read_prompts(file("a b\r\n[1, 2]\n[no list]\n12\n"), letters, 128)
    assert prompts.token_ids == [[97, 98], [1, 2], [ord(c) for c in "[nolist]"], [49, 50]]
    assert prompts.texts == ["a b", None, "[no list]", "12"]
    assert tokenizer_of("llama-tiny") is None
    assert tokenizer_of(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "tokenizer", "message"),
    [
        *(
            (t, None, "token ids between spaces")
            for t in ("1 x", "1.5", "[1, 2", '["a"]', "[true]")
        ),
        ("[" * 100_000, None, "token ids between spaces"),
        ("1 512", None, "token ids from 0 to 127, got 512"),
        ("[3, -2]", None, "token ids from 0 to 127, got -2"),
        ("aé", letters, "token ids from 0 to 127, got 233"),
        ("[]", letters, "at least one token, got none"),
    ],
    ids=lambda value: str(value)[:8],
)
def test_a_wrong_line_has_its_place(text, tokenizer, message, file):
    path = file(f"\n1 2\n{text}\n")
    with pytest.raises(ValueError, match=f"^prompts must .*{message}") as error:
        read_prompts(path, tokenizer, 128)
    assert str(error.value).endswith(f"at {path}:3")
    assert len(str(error.value)) < 400


def test_a_file_must_be_text_with_a_line(file, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for path, message in (
        (file("\n\n"), "hold at least one line"),
        (tmp_path, "be a text file, got "),
        (tmp_path / "binary", "be a text file, got "),
    ):
        with pytest.raises(ValueError, match=f"^prompts must {message}"):
            read_prompts(path, None, 8)
