"""`attn-ops chat`: a conversation in the terminal, each answer as it is drawn."""

import sys
from collections.abc import Iterator
from typing import Any

import torch

import fx_passes
from graphs.app.presets import load
from graphs.app.prompts import tokenizer_of
from graphs.app.run import device_of
from graphs.sampling import SamplingParams
from graphs.sampling.params import check_positive
from graphs.session import DecodeSession

MAX_TOKENS = 4096
"""Of a conversation, if the model takes as many."""


class Chat:
    """One conversation with a model. When it is full, its oldest turns are forgotten.

    Args:
        model: as in `load`, with a tokenizer that has a chat template.
        system: what the model is told first; None: what its template says.

    Raises:
        ValueError: an argument is out of range, or the model cannot chat.
    """

    def __init__(
        self,
        model: str,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        system: str | None = None,
    ) -> None:
        check_positive(max_new_tokens=max_new_tokens)
        SamplingParams(temperature=temperature)
        self.tokenizer: Any = tokenizer_of(model)
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"model must have a tokenizer with a chat template, got {model!r}; "
                "attn-ops run takes others"
            )
        self.turns: list[list[dict[str, str]]] = []  # question and answer
        self.begin = [] if system is None else [{"role": "system", "content": system}]
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        where = device_of(None)
        subject: Any = load(model, where)
        most = getattr(subject.config.get_text_config(), "max_position_embeddings", MAX_TOKENS)
        options: dict[str, Any] = {"max_tokens": min(most, MAX_TOKENS)}
        if where.type == "cuda":
            subject = torch.compile(subject, backend=fx_passes.attn_ops, fullgraph=True)
        else:  # a chat is shorter than it takes to compile
            options["cudagraph_mode"] = "NONE"
        options |= {"share_prefixes": True, "cache_tokens": options["max_tokens"]}
        self.session = DecodeSession(subject, max_batch_size=1, tokenizer=self.tokenizer, **options)

    def ask(self, question: str) -> Iterator[str]:
        """The answer, piece by piece.

        Raises:
            ValueError: the question is too long.
        """
        turn = [{"role": "user", "content": question}]
        answer = ""
        for output in self.session.stream(
            self._tokens(turn),
            self.max_new_tokens,
            stop_token_ids=self.tokenizer.eos_token_id,  # a model's config may not name it
            temperature=self.temperature,
        ):
            answer += output.text
            yield output.text
        self.turns.append([*turn, {"role": "assistant", "content": answer}])

    def _tokens(self, turn: list[dict[str, str]]) -> list[int]:
        while True:
            messages = [*self.begin, *(m for past in self.turns for m in past), *turn]
            tokens = self.session.book.tokens_of.chat(messages)
            if len(tokens) + self.max_new_tokens <= self.session.max_tokens or not self.turns:
                return tokens
            del self.turns[0]


def chat(model: str, **options: Any) -> None:
    """Answer the lines of standard input, up to an empty one, /quit or its end.

    Raises:
        ValueError: as by `Chat`.
    """
    talk = Chat(model, **options)
    for question in _lines():
        try:
            for piece in talk.ask(question):
                print(piece, end="", flush=True)
            print()
        except ValueError as error:  # the question is too long, the next one may not be
            print(f"error: {error}", file=sys.stderr)


def _lines() -> Iterator[str]:
    typed = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if typed else "").strip()
        except EOFError:
            return
        if line in ("", "/quit"):
            return
        yield line
