"""Prompts files: token ids or text, and errors with path, line and column."""

import json
from pathlib import Path

import pytest

from graphs.app.prompts import Line, check_lines, encoded, has_tokenizer, read_lines


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "prompts.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write


class Letters:
    """A tokenizer whose ids are those of the letters; spaces are dropped."""

    def __call__(self, text: str) -> dict:
        return {"input_ids": [ord(letter) for letter in text if letter != " "]}


def test_token_ids(file):
    lines = read_lines(file("\ufeff1 2 3\n\n[4, 5, 6, 7]\r\n"))
    assert [line.number for line in lines] == [1, 3]
    prompts = encoded(lines, None, 8)
    assert prompts.token_ids == [[1, 2, 3], [4, 5, 6, 7]]
    assert prompts.texts == [None, None]


@pytest.mark.parametrize(
    ("text", "column"),
    [
        *(("1 x", 3), ("  1.5", 3), ("1 +2", 3), ("1 2_0", 3), ("1 " + "9" * 5000, 3)),
        *(("[1, 2", 6), ('["a"]', 1), ("[1.5]", 1), ("[true]", 1), ('{"a": 1}', 1)),
        ("[" * 100_000, 1),
    ],
    ids=lambda value: str(value)[:8],
)
def test_what_is_no_token_id_has_its_place(text, column, file):
    path = file(f"1 2\n{text}\n")
    with pytest.raises(ValueError, match=r"^prompts must be token ids between spaces") as error:
        check_lines(read_lines(path), "llama-tiny")
    assert str(error.value).endswith(f"at {path}:2:{column}")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("text", "token", "column"),
    [("1 2 512", 512, 5), ("  7   -1", -1, 7), ("[3, 511, 600]", 600, 10), ("[3,\t-2]", -2, 5)],
)
def test_an_unknown_token_id_has_its_place(text, token, column, file):
    path = file(f"1 2\n\n{text}\n")
    message = rf"^prompts must hold token ids from 0 to 511, got {token} at .*:3:{column}$"
    with pytest.raises(ValueError, match=message):
        check_lines(read_lines(path), "llama-tiny")
    with pytest.raises(ValueError, match=message):  # where only a model's config says how many
        encoded(read_lines(path), None, 512)


def test_a_file_must_be_text_with_a_line(file, tmp_path):
    with pytest.raises(ValueError, match=r"^prompts must hold at least one line"):
        read_lines(file("\n\n"))
    with pytest.raises(ValueError, match=r"^prompts must be a text file, got "):
        read_lines(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"^prompts must be a text file, got "):
        read_lines(tmp_path / "binary")
    with pytest.raises(ValueError, match=r"^prompts must hold at least one token, got none at"):
        encoded([Line("[]", "p.txt", 3)], None, 8)


def test_text_with_a_tokenizer(file):
    prompts = encoded(read_lines(file("a b\r\n[1, 2]\n[no list]\n")), Letters(), 128)
    assert prompts.token_ids == [[97, 98], [1, 2], [ord(c) for c in "[nolist]"]]
    assert prompts.texts == ["a b", None, "[no list]"]


@pytest.mark.parametrize(("text", "got"), [("aé", "token id 233"), (" x", "no token")])
def test_text_that_gives_no_known_tokens(text, got):
    class Tokenizer(Letters):
        def __call__(self, text: str) -> dict:
            return {"input_ids": [] if text == " x" else super().__call__(text)["input_ids"]}

    with pytest.raises(ValueError, match=rf"got {got} from the tokenizer at p.txt:2$"):
        encoded([Line(text, "p.txt", 2)], Tokenizer(), 128)


def test_a_directory_with_a_tokenizer(tmp_path, file):
    assert not has_tokenizer("llama-tiny")
    assert not has_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    assert has_tokenizer(str(tmp_path))
    check_lines(read_lines(file("any text")), str(tmp_path))
