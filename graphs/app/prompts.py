"""Prompts from a file: text where the model's directory has a tokenizer, else token ids."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphs.app.presets import PRESETS

TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files of which a directory with a tokenizer has one."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a prompts file that is not empty."""

    text: str
    path: str
    number: int  # from 1

    def place(self, column: int = 0) -> str:
        """Path, line and, if it is known, column; both from 1."""
        return f"{self.path}:{self.number}" + (f":{column}" if column else "")

    def token_ids(self) -> list[int]:
        """Of a line of token ids: between spaces, or a JSON list.

        Raises:
            ValueError: it holds something else.
        """
        if self.is_json:
            return self._listed()
        for word in re.finditer(r"\S+", self.text):
            if not re.fullmatch(r"-?\d{1,18}", word[0], flags=re.ASCII):
                raise self._refused(word[0], word.start() + 1)
        return [int(word) for word in self.text.split()]

    @property
    def is_json(self) -> bool:
        return self.text.lstrip().startswith("[")

    def check_range(self, vocab_size: int) -> None:
        """Raise a ValueError with the column of the first token id that is not known."""
        for digits in re.finditer(r"-?\d+", self.text):
            if not 0 <= int(digits[0]) < vocab_size:
                raise ValueError(
                    f"prompts must hold token ids from 0 to {vocab_size - 1}, got {digits[0]} "
                    f"at {self.place(digits.start() + 1)}"
                )

    def _listed(self) -> list[int]:
        column = 1
        try:
            tokens: Any = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            tokens, column = None, getattr(error, "colno", 1)
        if not isinstance(tokens, list) or any(type(t) is not int for t in tokens):
            raise self._refused(self.text.strip(), column)
        return tokens

    def _refused(self, got: str, column: int) -> ValueError:
        return ValueError(
            "prompts must be token ids between spaces or a JSON list of them where the model "
            f"has no tokenizer, got {got!r:.80} at {self.place(column)}"
        )


@dataclasses.dataclass(frozen=True)
class Prompts:
    """What to generate from."""

    token_ids: list[list[int]]
    texts: list[str | None]  # None: it was given as token ids


def read_lines(path: str | Path) -> list[Line]:
    """The lines of a prompts file that are not empty.

    Raises:
        ValueError: it cannot be read, or has none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts must be a text file, got {path}: {error}") from error
    lines = [Line(line, str(path), i) for i, line in enumerate(text.split("\n"), 1)]
    lines = [line for line in lines if line.text.strip()]
    if not lines:
        raise ValueError(f"prompts must hold at least one line, got none in {path}")
    return lines


def has_tokenizer(model: str) -> bool:
    """Whether a model, by its name, is a directory with a tokenizer."""
    return model not in PRESETS and any(Path(model, name).is_file() for name in TOKENIZERS)


def check_lines(lines: Sequence[Line], model: str) -> None:
    """What can be told without torch: token ids, and for a preset their range.

    Raises:
        ValueError: with path, line and column.
    """
    text = has_tokenizer(model)
    for line in lines:
        if not text:
            line.token_ids()
        if model in PRESETS:
            line.check_range(PRESETS[model].sizes["vocab_size"])


def encoded(lines: Sequence[Line], tokenizer: Any | None, vocab_size: int) -> Prompts:
    """The prompts of the lines. With a tokenizer a line is text, unless it is a JSON list of ints.

    Args:
        tokenizer: of Transformers; None: every line holds token ids.

    Raises:
        ValueError: a line is neither, holds no token or one that the model does not know.
    """
    rows = [_encoded(line, tokenizer, vocab_size) for line in lines]
    return Prompts([tokens for tokens, _ in rows], [text for _, text in rows])


def _encoded(line: Line, tokenizer: Any | None, vocab_size: int) -> tuple[list[int], str | None]:
    if tokenizer is not None and not (line.is_json and _holds_ids(line)):
        text = line.text.rstrip("\r")
        tokens = [int(t) for t in tokenizer(text)["input_ids"]]
        unknown = [t for t in tokens if not 0 <= t < vocab_size]
        if unknown or not tokens:
            got = f"token id {unknown[0]}" if unknown else "no token"
            raise ValueError(
                f"prompts must become token ids from 0 to {vocab_size - 1}, got {got} "
                f"from the tokenizer at {line.place()}"
            )
        return tokens, text
    tokens = line.token_ids()
    line.check_range(vocab_size)
    if not tokens:
        raise ValueError(f"prompts must hold at least one token, got none at {line.place()}")
    return tokens, None


def _holds_ids(line: Line) -> bool:
    try:
        line.token_ids()
    except ValueError:
        return False
    return True
