"""Prompts: questions, or those of a file: text where the model has a tokenizer, else token ids."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphs.app.presets import PRESETS, Packaged, source

TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)
"""A directory with a tokenizer has one of these files."""

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
    packaged = isinstance(PRESETS.get(model), Packaged)
    if not packaged and not any(Path(model, name).is_file() for name in TOKENIZERS):
        return None
    from transformers import AutoTokenizer

    kept = source(model)
    try:
        return AutoTokenizer.from_pretrained(**kept, local_files_only=True)
    except Exception as error:  # of whatever library it is made with
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model must have a tokenizer that loads, got {model!r}: {reason}"
        ) from error


def questions(tokenizer: Any) -> Prompts:
    """`QUESTIONS`, each the first one of a chat where the tokenizer has a template for chats."""
    if getattr(tokenizer, "chat_template", None):
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        ids = [chat_tokens(tokenizer, chat) for chat in chats]
    else:
        ids = [list(tokenizer(question)["input_ids"]) for question in QUESTIONS]
    return Prompts(ids, list(QUESTIONS))


def chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A chat in the words of the tokenizer's template, up to where the answer begins.

    Raises:
        ValueError: the template refuses the messages, as some do a system's.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
    except TemplateError as error:
        raise ValueError(f"messages must suit the model's chat template, got: {error}") from error


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
