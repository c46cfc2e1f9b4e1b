"""Prompts as callers give them, text or token ids: checked, and as lists of ints."""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from graphs.requests.text import TextOfTokens, with_text

TOKENIZE = (
    "tokenize first, e.g. tokenizer(text)['input_ids'], or make the session with tokenizer=..."
)

TEMPLATE = "tokenize first, e.g. tokenizer.apply_chat_template(messages)['input_ids']"


def listed(name: str, values: Any, what: str) -> list[Any]:
    """`values` as a list, or a ValueError: no text, no mapping, nothing that has no entries."""
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError
        return list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:  # of a tensor without dimensions too
        text = f"{name} must be a sequence of {what}, got {values!r:.80}{_advice(name, values)}"
        raise ValueError(text) from None


def _advice(name: str, values: Any) -> str:
    """What a caller does about text, a tokenizer's mapping, or a prompt without a list around."""
    if isinstance(values, Mapping) and "role" in values and name == "prompt":
        return f"; {TEMPLATE}"
    if isinstance(values, str | bytes) and name in ("prompt", "prompts"):
        return f"; {TOKENIZE}"
    if name == "prompt" and isinstance(values, int):
        return "; several prompts are a list of lists"
    return ""


def listed_ids(name: str, values: Any) -> list[Any]:
    """`values` as a list of what the caller gave: none, one token or several."""
    if values is None:
        return []
    single = isinstance(values, str | bytes) or not isinstance(values, Iterable)
    return [values] if single else listed(name, values, "token ids")


def ints(name: str, values: Any) -> list[int]:
    """`values` as ints; integer tensors and NumPy ints are taken too."""
    tokens, given = [], listed(name, values, "token ids")
    if set(map(type, given)) == {int}:
        return given  # ten times as fast as one by one
    for value in given:
        try:
            tokens.append(operator.index(value))
        except TypeError:
            tokens.append(None)
        if tokens[-1] is None or isinstance(value, bool):
            advice = _advice(name, value) if not isinstance(value, int) else ""
            raise ValueError(f"{name} must hold ints, got {value!r}{advice}")
    return tokens


def token_ids(name: str, values: Any, vocab_size: int, *, ordered: bool = True) -> list[int]:
    """`values` as ints in the vocabulary."""
    if ordered and isinstance(values, set | frozenset):
        raise ValueError(f"{name} must have an order, got {values!r:.80}")
    tokens = ints(name, values)
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        bad = next(t for t in tokens if not 0 <= t < vocab_size)
        raise ValueError(f"{name} must hold token ids from 0 to {vocab_size - 1}, got {bad}")
    return tokens


def unpadded(prompts: Any, pads: Set[int], ends: Set[int]) -> list[Any]:
    """A list of prompts without their padding, from what a caller gave.

    A tokenizer's mapping, of a batch or of one prompt, says by its attention_mask what padding is.
    In an array [S, L], or a mapping of equally long rows, without a mask it is `pads`, as in
    `generate`. Lists have no padding.

    Raises:
        ValueError: there is padding between tokens, or `pads` are also `ends`, so it may be text.
    """
    rows, mask = _parts("prompts", prompts)
    guessed = mask is None and getattr(rows, "ndim", 0) == 2
    rows = listed("prompts", rows, "prompts")
    if mask is None and isinstance(prompts, Mapping) and len(rows) > 1:
        lengths = {len(row) if isinstance(row, list) else -1 for row in rows}
        guessed = guessed or (len(lengths) == 1 and -1 not in lengths)
    if guessed:
        mask = _guessed_mask(rows, pads, ends)
    if mask is None:
        return [_shown(*_one(*_parts("prompt", row))) for row in rows]
    masks = listed("attention_mask", mask, "rows")
    if len(masks) != len(rows):
        raise ValueError(f"attention_mask must have {len(rows)} rows, got {len(masks)}")
    return list(map(_shown, rows, masks))


def _parts(name: str, values: Any) -> tuple[Any, Any]:
    """Token ids and attention mask of a tokenizer's mapping; others have no mask."""
    if not isinstance(values, Mapping) or "input_ids" not in values:
        return values, None
    more = [key for key in values if key not in ("input_ids", "attention_mask")]
    if more:
        raise ValueError(f"{name} must hold input_ids and attention_mask alone, got also {more}")
    return values["input_ids"], values.get("attention_mask")


def _one(rows: Any, mask: Any) -> tuple[Any, Any]:
    """The row of a batch of one prompt, as a tokenizer returns tensors, and of its mask."""
    if getattr(rows, "ndim", 1) == 2 and len(rows) == 1:
        return rows[0], mask if getattr(mask, "ndim", 1) == 1 else mask[0]
    return rows, mask


def _guessed_mask(rows: list[Any], pads: Set[int], ends: Set[int]) -> list[list[int]] | None:
    if not pads & ends:
        return [[int(token not in pads) for token in row] for row in rows]
    if len(rows) > 1 and any(pads & {*row[:1], *row[-1:]} for row in rows):
        raise ValueError(
            f"prompts must say what padding is where pad_token_id is also eos, got {sorted(pads)} "
            "at the ends of rows; supported: a tokenizer's mapping with its attention_mask, or a "
            "list of lists without padding"
        )
    return None


def _shown(row: Any, mask: Any) -> Any:
    if mask is None:
        return row
    tokens, kept = listed("prompt", row, "token ids"), listed("attention_mask", mask, "0 and 1")
    if len(kept) != len(tokens) or any(k not in (0, 1) for k in kept):
        raise ValueError(
            f"attention_mask must hold 0 or 1 for each of {len(tokens)} tokens, got {kept!r:.80}"
        )
    begin = kept.index(1) if 1 in kept else 0
    end = begin + int(sum(kept))
    if not all(kept[begin:end]):
        raise ValueError(
            f"prompts must be padded at the ends of rows alone, got the mask {kept!r:.80}"
        )
    return tokens[begin:end]


class Tokens:
    """A session's tokenizer: text to tokens, and what follows from it.

    Args:
        tokenizer: of Transformers; None: text is refused, and results have none.
        vocab_size: V, of the model's logits; what grammars need.
    """

    def __init__(self, tokenizer: Any, vocab_size: int = 0) -> None:
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise ValueError(
                f"tokenizer must be a tokenizer of Transformers or None, got {tokenizer!r:.80}"
            )
        self.tokenizer: Any = tokenizer
        self._vocab_size = vocab_size
        self._grammars: dict[frozenset[int], Any] = {}  # by the tokens that end a request

    def prompts(self, prompts: Any, *, special: bool = True) -> Any:
        """Prompts of a call, with token ids in place of text; `special`: see `ids`."""
        if self.tokenizer is None:
            return prompts
        if isinstance(prompts, str):
            prompts = [prompts]
        if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
            return prompts
        return [self.ids(x, special=special) if isinstance(x, str) else x for x in prompts]

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, `special`: with what the tokenizer puts around a prompt."""
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def chat(self, messages: Any) -> list[int]:
        """Token ids of a conversation that asks for an answer, by the tokenizer's template."""
        from jinja2 import TemplateError

        known = self._known("messages", messages)
        turns = messages if isinstance(messages, Sequence) else ()
        if not turns or not all(isinstance(x, Mapping) and "role" in x for x in turns):
            raise ValueError(
                f"messages must be a list of mappings with role and content, got {messages!r:.80}"
            )
        try:
            return known.apply_chat_template(
                list(map(with_text, turns)), add_generation_prompt=True, return_dict=False
            )
        except (TemplateError, ValueError) as error:  # some refuse a system's message
            raise ValueError(
                f"messages must suit the model's chat template, got: {error}"
            ) from None

    def words(self, words: Any) -> list[Sequence[int]] | None:
        """Token ids of `bad_words`: of each word as it begins a text, and as it goes on."""
        if words is None:
            return None
        words = words.tolist() if hasattr(words, "tolist") else words
        if isinstance(words, str) or not isinstance(words, Sequence):
            raise ValueError(f"bad_words must be a list of texts or token ids, got {words!r:.80}")
        found: list[Sequence[int]] = []
        for word in words:
            if not isinstance(word, str):
                found.append(word)
                continue
            self._known("bad_words of text", word)
            if not word:
                raise ValueError("bad_words must hold texts, got an empty one")
            bare = word.lstrip()
            texts = dict.fromkeys((word, bare, " " + bare) if bare else (word,))
            found += [self.ids(text, special=False) for text in texts]
        return found

    def texts(self, wanted: Any) -> Callable[[], TextOfTokens | None]:
        """Makes what decodes a request's tokens, where strings may end it."""
        stop, tokenizer = wanted.stop, self.tokenizer
        stop = stop.tolist() if hasattr(stop, "tolist") else stop
        if stop is None or not stop:
            return lambda: TextOfTokens(tokenizer) if wanted.stream and tokenizer else None
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
            raise ValueError(f"stop must be a text or a list of texts, got {stop!r:.80}")
        if type(wanted.include_stop_str_in_output) is not bool:
            raise ValueError(
                "include_stop_str_in_output must be True or False, "
                f"got {wanted.include_stop_str_in_output!r}"
            )
        known, include = self._known("stop", stop), wanted.include_stop_str_in_output
        added = getattr(known, "added_tokens_decoder", {}).items()
        named = {token: one.content for token, one in added if one.special}
        ends = {token: text for token, text in named.items() if text in strings}
        return lambda: TextOfTokens(known, strings, ends=ends, include_stop=include)

    def grammars(self, wanted: Any, stops: Collection[int]) -> Callable[[], Any]:
        """Makes a request's grammar, where its output is structured."""
        if wanted.structured_outputs is None:
            return lambda: None
        from graphs.requests.grammar import Grammars, GrammarState

        known, key = self._known("structured_outputs", wanted.structured_outputs), frozenset(stops)
        if key not in self._grammars:
            self._grammars[key] = Grammars(known, self._vocab_size, key)
        compiled = self._grammars[key].compile(wanted.structured_outputs)
        return lambda: GrammarState(compiled)

    def _known(self, what: str, value: Any) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                f"{what} must come with DecodeSession(..., tokenizer=...), got {value!r:.80} and "
                "no tokenizer; supported: token ids"
            )
        return self.tokenizer
