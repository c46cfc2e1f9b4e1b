"""Text of generated tokens, as they come: never half a character, and cut at stop strings.

And the text of a conversation's turns.
"""

import types
from collections.abc import Mapping, Sequence
from typing import Any

_HALF = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer puts where the bytes of a character are not complete yet."""


class TextOfTokens:
    """Decodes one request's tokens bit by bit.

    What `take` returns, joined, is what the tokenizer turns all tokens into, up to the first stop
    string. (Where a tokenizer changes characters that were complete, those that were taken stay.)
    Tokens are decoded in a window that begins at a character's border, so a token costs the same
    late in a text as early.

    Args:
        tokenizer: `decode(ids, skip_special_tokens=bool) -> str`, of Transformers or `tokenizers`.
        stop: strings that end the text.
        ends: special tokens that are stop strings, which no text shows.
        include_stop: whether the text keeps the one that ended it.
        skip_special_tokens: whether tokens such as eos are left out of the text.

    Attributes:
        text: so far; behind a stop string, the final one.
        stop_reason: the stop string that ended it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        ends: Mapping[int, str] = types.MappingProxyType({}),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._stop, self._include = tokenizer, tuple(stop), include_stop
        self._skip, self._ends = skip_special_tokens, ends
        self._ids: list[int] = []
        self._begin = self._read = 0  # the window's first token, and the first not in `text`
        self._longest = max(map(len, self._stop), default=1)
        self._early = 0  # characters behind which stop strings end
        self._taken = 0  # characters that `take` has returned
        self.text = ""
        self.stop_reason: str | None = None

    def push(self, token: int, *, stops: bool = True) -> str | None:
        """Add a token; returns the stop string that it completes, if any, and if it `stops`."""
        if self.stop_reason is not None:
            return self.stop_reason
        if stops and token in self._ends:
            self.text = self.finish() + self._ends[token] * self._include
            self.stop_reason = self._ends[token]
            return self.stop_reason
        self._ids.append(token)
        known, now = self._decoded(self._begin, self._read), self._decoded(self._begin, None)
        piece = _behind(known, now)
        if piece and not now.endswith(_HALF):
            self._add(piece, stops=stops)
            self._begin, self._read = self._read, len(self._ids)
        elif stops and self._found(self.text + piece, len(self.text)):
            self._add(piece.rstrip(_HALF))
        return self.stop_reason

    def finish(self) -> str:
        """The final text; no token comes any more."""
        if self.stop_reason is None and self._read < len(self._ids):
            known, now = self._decoded(self._begin, self._read), self._decoded(self._begin, None)
            self._add(_behind(known, now), stops=False)
            self._begin, self._read = self._read, len(self._ids)
        return self.text

    def take(self, *, finished: bool = False) -> str:
        """The text since the last call that no later token can take back."""
        end = len(self.finish() if finished else self.text)
        if not finished and self.stop_reason is None:
            end -= self._held()
        begin, self._taken = self._taken, max(end, self._taken)
        return self.text[begin : self._taken]

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        tail = self.text[-(self._longest - 1) :] if self._longest > 1 else ""
        lengths = range(len(tail), 0, -1)
        return next((n for n in lengths if any(s.startswith(tail[-n:]) for s in self._stop)), 0)

    def _add(self, piece: str, *, stops: bool = True) -> None:
        num_known = len(self.text)
        self.text += piece
        if not stops:
            self._early = len(self.text)
        elif found := self._found(self.text, num_known):
            at, self.stop_reason = min(found, key=lambda pair: pair[0])
            self.text = self.text[: at + len(self.stop_reason) * self._include]

    def _found(self, text: str, num_known: int) -> list[tuple[int, str]]:
        """Stop strings that end behind the first characters of a text, with where they begin."""
        end = max(num_known, self._early)
        return [(at, s) for s in self._stop if (at := text.find(s, max(0, end - len(s) + 1))) >= 0]

    def _decoded(self, begin: int, end: int | None) -> str:
        ids = self._ids[begin:end]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


def _behind(known: str, now: str) -> str:
    """What `now` has behind `known`, or behind the part that both begin with."""
    if now.startswith(known):
        return now[len(known) :]
    pairs = enumerate(zip(known, now, strict=False))
    return now[next((i for i, (a, b) in pairs if a != b), len(now)) :]


def with_text(turn: Mapping[str, Any]) -> dict[str, Any]:
    """One of a conversation, whose content may be OpenAI's list of parts: of text alone."""
    parts = turn.get("content")
    if not isinstance(parts, list):
        return dict(turn)
    if not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
        raise ValueError(f"content must be text or parts with a text each, got {parts!r:.80}")
    return {**turn, "content": "".join(part["text"] for part in parts)}
