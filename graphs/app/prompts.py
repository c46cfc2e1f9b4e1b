"""Prompts: questions, or those of a file: text where the model has a tokenizer, else token ids."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from graphs.app.presets import PRESETS, Packaged, source
from graphs.requests.tokens import Tokens

QUESTIONS = (
    "What is the capital of France?",
    "What is the opposite of hot?",
    "How many days are in a week?",
    "Name three fruits.",
    "Write one sentence about the sea.",
)
"""What a model with a tokenizer is asked when no prompts are given."""


@dataclasses.dataclass(frozen=True)
class Prompts:
    """What to generate from."""

    token_ids: list[list[int]]
    texts: list[str | None]  # None: it was given as token ids


def tokenizer_of(model: str) -> Any | None:
    """The tokenizer in the model's directory or package, or None."""
    from graphs.pretrained import tokenizer_of as of_folder  # it imports torch

    if not isinstance(PRESETS.get(model), Packaged) and not Path(model).is_dir():
        return None
    path, more = source(model)
    return of_folder(path, **more, local_files_only=True)


def questions(tokenizer: Any) -> Prompts:
    """`QUESTIONS`, each the first one of a chat where the tokenizer has a template for chats."""
    if getattr(tokenizer, "chat_template", None):
        tokens_of = Tokens(tokenizer)
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        ids = [tokens_of.chat(chat) for chat in chats]
    else:
        ids = [list(tokenizer(question)["input_ids"]) for question in QUESTIONS]
    return Prompts(ids, list(QUESTIONS))


def read_prompts(path: str | Path, tokenizer: Any | None, vocab_size: int) -> Prompts:
    """Read a prompts file. Empty lines do not count.

    With a tokenizer a line is text, unless it is a JSON list of ints. Without one it is such a
    list, or token ids between spaces.

    Raises:
        ValueError: the file cannot be read, has no lines, or a line gives no known tokens.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts must be a text file, got {path}: {error}") from error
    prompts = Prompts([], [])
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, tokens = None, _token_ids(line, words=tokenizer is None)
        if tokens is None and tokenizer is not None:
            text = line.rstrip("\r")
            tokens = [int(t) for t in tokenizer(text)["input_ids"]]
        where = f"at {path}:{number}"
        if tokens is None:
            raise ValueError(
                "prompts must be token ids between spaces or a JSON list of them where the model "
                f"has no tokenizer, got {line.strip()!r:.80} {where}"
            )
        if not tokens:
            raise ValueError(f"prompts must hold at least one token, got none {where}")
        unknown = next((t for t in tokens if not 0 <= t < vocab_size), None)
        if unknown is not None:
            raise ValueError(
                f"prompts must hold token ids from 0 to {vocab_size - 1}, got {unknown} {where}"
            )
        prompts.token_ids.append(tokens)
        prompts.texts.append(text)
    if not prompts.texts:
        raise ValueError(f"prompts must hold at least one line, got none in {path}")
    return prompts


def _token_ids(line: str, *, words: bool) -> list[int] | None:
    """The token ids in a line: a JSON list, or with `words` also ints between spaces."""
    try:
        if words and not line.lstrip().startswith("["):
            return [int(word) for word in line.split()]
        tokens = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(tokens, list) and all(type(t) is int for t in tokens)
    return tokens if whole else None
