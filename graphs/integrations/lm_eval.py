"""The model `attn-ops` of lm-eval, whose tasks run on a `DecodeSession`.

    python -m graphs.integrations.lm_eval run --model attn-ops --model_args pretrained=DIR ...

The command is lm-eval's own, with this model among its models. Prompts, windows and stops are those
of lm-eval's model `hf`, so the results are too.
"""

import bisect
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.utils import (
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)

from graphs.options import SessionOptions
from graphs.pretrained import tokenizer_of
from graphs.session import DecodeSession

CPU_CACHE_TOKENS = 16_384
"""Of a cache on a CPU where nobody says; requests that do not fit wait."""

LOADING = ("revision", "subfolder", "gguf_file", "trust_remote_code")
"""Arguments that Transformers takes for the config, the tokenizer and the model."""

OF_TEXTS = (
    *("add_bos_token", "prefix_token_id"),
    *("think_end_token", "enable_thinking", "chat_template_args"),
)
"""Arguments that change no session."""

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a context and of its continuation, together at most `max_length` + 1."""

logger = logging.getLogger(__name__)


class AttnOpsLM(TemplateLM):
    """Scores and generates for lm-eval: all requests of a call at once, neighbours by prefix.

    Args:
        session: with a tokenizer; longer texts lose what is before its last `max_tokens` tokens.
        add_bos_token: whether texts begin with BOS; None: as the tokenizer does.
        prefix_token_id: stands for an empty context; None: BOS, else EOS.
        think_end_token: text that ends a model's thoughts; the answer is what follows it.
        enable_thinking, chat_template_args: for the chat template.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        session: DecodeSession,
        *,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if session.tokenizer is None:
            raise ValueError("session must have a tokenizer, got none")
        if not isinstance(think_end_token, str | None) or (enable_thinking and not think_end_token):
            raise ValueError(
                f"think_end_token must be a text where enable_thinking={enable_thinking!r}, "
                f"got {think_end_token!r}; supported: None where no thoughts are asked for"
            )
        self.session, self.max_length = session, session.max_tokens
        self.tokenizer: Any = session.tokenizer
        self.add_bos_token, self.think_end_token = add_bos_token, think_end_token
        self._prefix_token_id, self._thinks = prefix_token_id, enable_thinking
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._template_args = {**(chat_template_args or {}), **thinking}
        added = self.tokenizer.added_tokens_decoder.items()
        self._special = {str(token) for _, token in added if token.special}

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "AttnOpsLM":
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "AttnOpsLM":
        """From `model_args`, which come before the arguments of lm-eval's command."""
        more = {name: x for name, x in (additional_config or {}).items() if x is not None}
        if str(more.get("device")).startswith("cuda") and not torch.cuda.is_available():
            logger.warning("device=%s is not here: the CPU is taken", more.pop("device"))
        args = more | arg_dict
        own = {name: args.pop(name) for name in OF_TEXTS if name in args}
        return cls(_loaded(add_bos_token=own.get("add_bos_token"), **args), **own)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        tokens = (self._prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id)
        found = next((token for token in tokens if token is not None), None)
        if found is None:
            raise ValueError(
                "prefix_token_id must be given where a tokenizer has no BOS and no EOS"
            )
        return found

    @property
    def max_gen_toks(self) -> int:
        """Tokens of a generation whose task does not say."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        } | self._template_args
        try:
            return self.tokenizer.apply_chat_template(chat_history, **options)
        except TemplateError:
            logger.warning("the chat template takes no system message: it is left out")
            rest = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(rest, **options)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids; a text that begins with the prefix gets no second one."""
        special = add_special_tokens
        if special is None:
            prefix = self.tokenizer.decode(self.prefix_token_id) if prefix is None else prefix
            special = False if prefix and string.startswith(prefix) else self.add_bos_token
        return self.tokenizer.encode(string, add_special_tokens=special is not False)

    # -- scores ------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        if self._thinks:
            raise ValueError(
                "enable_thinking must be off where continuations are scored, got True; "
                "supported: tasks that generate"
            )
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        self._say_cut(self.max_length + 1, [len(head) + len(tail) for _, head, tail in requests])
        answers = self._scored([self._row(head, tail) for _, head, tail in requests])
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        texts = [request.args for request in requests]
        parts = [self._windows(text) for (text,) in texts]
        answers = iter(self._scored([row for rows in parts for row in rows]))
        totals = [sum(next(answers)[0] for _ in rows) for rows in parts]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", text, total)
        return totals

    def _windows(self, text: str) -> list[Row]:
        """A text in parts, each with as much before it as the model sees."""
        tokens, prefix = self.tok_encode(text), self.prefix_token_id
        windows = get_rolling_token_windows(tokens, prefix, self.max_length, context_len=1)
        return [self._row(*make_disjoint_window(window)) for window in windows]

    def _row(self, context: Sequence[int], continuation: Sequence[int]) -> Row:
        room = self.max_length + 1 - len(continuation)
        if not 1 <= room <= self.max_length or not context:
            raise ValueError(
                f"continuation must have 1 to max_length={self.max_length} tokens, and its context "
                f"at least 1, got {len(continuation)} and {len(context)}"
            )
        return tuple(context[-room:]), tuple(continuation)

    def _scored(self, rows: list[Row]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would generate it."""
        unique = sorted(set(rows))
        scores = self.session.score([head for head, _ in unique], [tail for _, tail in unique])
        found = [(score.total, all(score.is_argmax)) for score in scores]
        by_row = dict(zip(unique, found, strict=True))
        return [by_row[row] for row in rows]

    def _say_cut(self, most: int, lengths: Sequence[int]) -> None:
        if number := sum(length > most for length in lengths):
            logger.warning(
                "%d of %d requests lose their first tokens: they are longer than max_length=%d",
                *(number, len(lengths), self.max_length),
            )

    # -- generations -------------------------------------------------------------------------------

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            contexts = [requests[number].args[0] for number in numbers]
            generated = self._generated(contexts, requests[numbers[0]].args[1])
            for number, text in zip(numbers, generated, strict=True):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _generated(self, contexts: Sequence[str], asked: Mapping[str, Any]) -> list[str]:
        """Texts after contexts that are generated in the same way."""
        until, new, wanted = self._wanted(asked)
        room = self.max_length - new
        if room < 1:
            raise ValueError(
                f"max_gen_toks must be under max_length={self.max_length}, got {new}; "
                "gen_kwargs max_gen_toks=N asks for fewer"
            )
        bos, nothing = self.tokenizer.bos_token or "", [self.prefix_token_id]
        prompts = [self.tok_encode(text, prefix=bos) or nothing for text in contexts]
        self._say_cut(room, list(map(len, prompts)))
        prompts = [prompt[-room:] for prompt in prompts]
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        results = self.session.generate([prompts[i] for i in order], new, **wanted)
        found = dict(zip(order, results, strict=True))
        return [self._text(found[i].token_ids, until) for i in range(len(prompts))]

    def _wanted(self, asked: Mapping[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
        """Texts that end a generation, its tokens at most, and arguments of the session."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = [text for text in handle_stop_sequences(kwargs.pop("until"), eos) if text]
        new, draws = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
        if kwargs.get("num_beams") == 1:
            del kwargs["num_beams"]
        if not draws:
            kwargs["temperature"] = 0.0
        elif not kwargs.get("temperature"):
            raise ValueError("temperature must be above 0 with do_sample=True, got 0")
        else:
            config = getattr(self.session.original, "generation_config", None)
            if getattr(config, "top_k", None) is None:
                kwargs = {"top_k": 50} | kwargs  # as in Transformers' generate
        return until, new, kwargs | {"stop": until}

    def _text(self, tokens: Sequence[int], until: list[str]) -> str:
        """The answer in generated tokens: after thoughts, before what ends it."""
        for stop in until:
            if stop not in self._special and any(token in stop for token in self._special):
                tokens = self._before(tokens, stop)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return postprocess_generated_text(text, until, self.think_end_token)

    def _before(self, tokens: Sequence[int], stop: str) -> Sequence[int]:
        """The fewest first tokens that hold a stop of special tokens and others; else all."""

        def has(number: int) -> bool:
            return stop in self.tokenizer.decode(tokens[:number], skip_special_tokens=False)

        return tokens[: bisect.bisect_left(range(len(tokens) + 1), True, key=has)]


def _loaded(
    pretrained: str,
    tokenizer: str | None = None,
    batch_size: int | str = "auto",
    max_batch_size: int = 256,
    max_length: int | None = None,
    add_bos_token: bool | None = None,
    **options: Any,
) -> DecodeSession:
    """A session of a model for requests of `max_length` tokens; None: as many as it has positions.

    Raises:
        ValueError: an argument is not known or out of range, or the model does not load.
    """
    from transformers import AutoConfig

    _check_known(options)
    loading = {name: options.pop(name) for name in LOADING if name in options}
    bos = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    own = tokenizer_of(tokenizer or pretrained, **loading, **bos)
    try:
        config = AutoConfig.from_pretrained(pretrained, **loading)
    except (OSError, ValueError) as error:
        text = f"pretrained must be a folder with a model, got {pretrained!r}: {error}"
        raise ValueError(text) from None
    length = max_length or resolve_max_length(config, own)
    session: dict[str, Any] = {"share_prefixes": True, "lazy_capture": True}
    session |= {"max_batch_size": _batch_size(batch_size, max_batch_size), "max_tokens": length}
    if not torch.cuda.is_available() or str(options.get("device")) == "cpu":
        session["cache_tokens"] = max(length, CPU_CACHE_TOKENS)
    return DecodeSession.from_pretrained(
        pretrained, tokenizer=own, model_kwargs=loading, **(session | options)
    )


def _check_known(options: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(SessionOptions)]
    known = [*(name for name in known if name != "max_tokens"), "dtype", "device", "compile"]
    if unknown := [name for name in options if name not in (*known, *LOADING)]:
        supported = ", ".join([*OF_TEXTS, "tokenizer", "max_length", *LOADING, *known])
        raise ValueError(
            f"model_args must be known, got {unknown[0]}={options[unknown[0]]!r}; "
            f"supported: pretrained, {supported}"
        )


def _batch_size(asked: int | str, most: int) -> int:
    if str(asked).split(":")[0] == "auto":
        return most
    if not str(asked).isdigit() or int(asked) < 1:
        raise ValueError(f"batch_size must be a positive int or auto, got {asked!r}")
    return int(asked)


if "attn-ops" not in model_registry:  # an entry point may have been first
    model_registry.register("attn-ops", target="graphs.integrations.lm_eval:AttnOpsLM")

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
