"""Grammars that a request's text obeys: JSON schemas, regexes, choices and EBNF, by xgrammar.

V rows of the logits, W = ceil(V / 32) words of a row of bits. Bit t % 32 of word t // 32 is set
where token t is allowed.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

CACHED = 128
"""Compiled grammars that a session keeps."""


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A grammar for a tokenizer; requests share it."""

    grammar: Any  # xgrammar.CompiledGrammar
    stops_W: np.ndarray  # int32 bits: the tokens that end a text


class Grammars:
    """Compiles the grammars of a session, and keeps the last `CACHED` ones.

    Special tokens are never part of a text, as decoding leaves them out.

    Args:
        tokenizer: a fast one of Transformers, or None: then every request for a grammar raises.
        vocab_size: V, which may be larger than the tokenizer's vocabulary.
        stop_token_ids: the tokens that may end a text; none for the tokenizer's eos.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: Iterable[int] = ()) -> None:
        self._tokenizer, self._num_words = tokenizer, -(-vocab_size // 32)
        self._stops = sorted(stop_token_ids)
        self._cached = functools.lru_cache(CACHED)(self._compile)

    def compile(self, asked: Mapping[str, Any]) -> Compiled:
        """The grammar that `asked` describes by one key, named as in vLLM.

        Args:
            asked: one of

                - json: a JSON schema as a mapping or text, or a pydantic model. Objects have their
                  properties in the schema's order, and no others unless it says so. A `pattern` is
                  that of a whole string, and oneOf is anyOf.
                - json_object: True, for any JSON object.
                - regex: of the whole text.
                - choice: the texts to choose from.
                - grammar: EBNF as in llama.cpp's GBNF, with a rule `root`.

        Raises:
            ValueError: `asked` is none of these, xgrammar cannot compile it or would skip a part
                of it, or there is no tokenizer.
            ImportError: xgrammar is not installed.
        """
        if not isinstance(asked, Mapping) or len(asked) != 1 or not asked.keys() <= _SOURCES.keys():
            raise ValueError(
                f"structured_outputs must be a mapping with one key, got {asked!r:.80}; "
                f"supported: {', '.join(_SOURCES)}"
            )
        if self._tokenizer is None:
            raise ValueError(
                f"structured_outputs must come with a tokenizer, got {asked!r:.80} without one; "
                "supported: sessions with a tokenizer"
            )
        ((kind, value),) = asked.items()
        method, source, supported = _SOURCES[kind]
        try:
            return self._cached(method, source(value))
        except (RuntimeError, TypeError, ValueError) as error:
            reason = re.sub(r"^\[\S+\] \S+: ", "", str(error)).strip()  # a time and a line of C++
            raise ValueError(
                f"structured_outputs must have a {kind} that xgrammar takes, got {value!r:.80}: "
                f"{reason:.300}; supported: {supported}"
            ) from None

    def _compile(self, method: str, source: str) -> Compiled:
        compiler = self._json_compiler if method == "compile_json_schema" else self._compiler
        return Compiled(getattr(compiler, method)(source), self._stops_W)

    # Cached: made at the first grammar. So are the others.
    @functools.cached_property
    def _compiler(self) -> Any:
        return self._compiler_of(self._info.decoded_vocab)

    # Cached: as `_compiler`.
    @functools.cached_property
    def _json_compiler(self) -> Any:
        """One without control characters: xgrammar 0.2.8 lets them into strings with a length."""
        control = re.compile(rb"[\x00-\x09\x0b-\x1f]")
        return self._compiler_of(
            [b"" if control.search(t) else t for t in self._info.decoded_vocab]
        )

    def _compiler_of(self, vocab: list[bytes]) -> Any:
        from xgrammar import GrammarCompiler, TokenizerInfo

        for token, added in self._tokenizer.added_tokens_decoder.items():
            if added.special and token < len(vocab):
                vocab[token] = b""  # xgrammar takes it for the text of its name
        told = self._info
        info = TokenizerInfo(
            vocab, stop_token_ids=told.stop_token_ids, add_prefix_space=told.add_prefix_space
        )
        return GrammarCompiler(info, max_threads=1, cache_enabled=False)

    # Cached: as `_compiler`.
    @functools.cached_property
    def _info(self) -> Any:
        """What xgrammar finds out about the tokenizer."""
        from xgrammar import TokenizerInfo

        stops = self._stops or [self._tokenizer.eos_token_id]
        if None in stops:
            raise ValueError("no eos token, so no text could end")
        return TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._num_words * 32, stop_token_ids=stops
        )

    # Cached: as `_compiler`.
    @functools.cached_property
    def _stops_W(self) -> np.ndarray:
        bits = np.zeros(self._num_words * 32, np.uint8)
        bits[self._info.stop_token_ids] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


class GrammarState:
    """How far the text of one request has come in its grammar."""

    def __init__(self, compiled: Compiled) -> None:
        from xgrammar import GrammarMatcher

        self._matcher, self._stops_W = GrammarMatcher(compiled.grammar), compiled.stops_W

    @property
    def is_done(self) -> bool:
        """Whether nothing but a stop token may follow."""
        if self._matcher.is_terminated() or not self._matcher.is_completed():
            return self._matcher.is_terminated()
        row_W = np.empty_like(self._stops_W)
        self.fill(row_W)
        return np.array_equal(row_W, self._stops_W)

    def accept(self, token: int) -> None:
        """Go on by a drawn token."""
        accepted = self._matcher.is_terminated() or self._matcher.accept_token(token)
        assert accepted, f"token {token} was drawn, which the grammar forbids"

    def fill(self, row: np.ndarray) -> None:
        """Write the allowed tokens to `row`, [W] int32."""
        if self._matcher.is_terminated():
            row[:] = self._stops_W
        else:
            self._matcher.fill_next_token_bitmask(row)

    def fill_drafted(self, rows: np.ndarray, draft: Sequence[int]) -> None:
        """Write the tokens allowed after none, one, ... all of the k tokens of a draft.

        Args:
            rows: [1 + k, W] int32. All bits are set after a token that the grammar forbids.
            draft: k tokens; the state is the same afterwards.
        """
        rows[:] = -1
        self.fill(rows[0])
        num_accepted = 0
        for row_W, token in zip(rows[1:], draft, strict=True):
            if self._matcher.is_terminated():
                if not self._stops_W[token // 32] >> token % 32 & 1:
                    break
            elif self._matcher.accept_token(token):
                num_accepted += 1
            else:
                break
            self.fill(row_W)
        self._matcher.rollback(num_accepted)


def _schema(value: Any) -> str:
    """A JSON schema's text; properties keep their order, which is that of the text drawn."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    schema = json.loads(value) if isinstance(value, str) else value
    if skipped := sorted(set(_skipped(schema))):
        raise ValueError(f"it would skip {', '.join(skipped)}")
    return json.dumps(schema)


_NEVER = ("not", "if", "contains", "uniqueItems", "dependentRequired", "dependentSchemas")
_BOUNDS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "minItems", "maxItems", "required"),
    *("minProperties", "maxProperties", "patternProperties", "propertyNames"),
)
_PARTS = ("properties", "additionalProperties", "items", "prefixItems")
_COMBINED = {"$ref", "anyOf", "oneOf", "allOf"}


def _skipped(schema: Any) -> Iterator[str]:
    """Keywords of a schema that xgrammar 0.2.8 passes over, at most with a line on stderr."""
    if not isinstance(schema, dict):
        return
    combined = schema.keys() & _COMBINED
    alone = combined or schema.keys() & {"const", "enum"}  # it looks at nothing else
    beside = (*_BOUNDS, *_PARTS) if alone else () if "type" in schema else _BOUNDS
    yield from (key for key in (*_NEVER, *beside) if schema.get(key, False) is not False)
    if "type" in schema and alone:
        named = [schema["const"]] if "const" in schema else schema.get("enum") or []
        listed = [part for key in combined - {"$ref"} for part in schema[key]]
        parts = [part for part in listed if isinstance(part, dict)]  # others are refused there
        same = all("$ref" in p or p.get("type") == schema["type"] for p in parts)
        if not (same and all(_is_of(value, schema["type"]) for value in named)):
            yield f"type beside {min(alone)}"
    if schema.get("type") == "number" and "multipleOf" in schema:
        yield "multipleOf of numbers"
    if "pattern" in schema:
        yield from (f"{key} beside pattern" for key in ("minLength", "maxLength") if key in schema)
        if re.search(r"\(\?<?[=!]", str(schema["pattern"])):
            yield "lookaround in a pattern"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "all but one of allOf"
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield "$ref to another document"
    named = schema.get("properties") or {}
    if any(name not in named for name in schema.get("required") or ()):
        yield "required names that are no properties"
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            value = list(value.values()) if isinstance(value, dict) else value
        if key not in ("const", "enum", "default", "examples"):
            for part in value if isinstance(value, list) else [value]:
                yield from _skipped(part)


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),), "object": (dict,), "array": (list,),
}  # fmt: skip


def _is_of(value: Any, kinds: Any) -> bool:
    """Whether a value is of a `type` of JSON schemas; True and False are no numbers."""
    kinds = kinds if isinstance(kinds, list) else [kinds]
    own = [k for k in kinds if isinstance(value, _TYPES.get(k, ()))]
    return bool(own) and (not isinstance(value, bool) or "boolean" in own)


def _any_object(value: Any) -> str:
    if value is not True:
        raise ValueError("it is not True")
    return '{"type": "object"}'


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("it is not text")
    return value


def _literals(value: Any) -> str:
    """EBNF of the texts to choose from; it reads the escapes of JSON."""
    if not isinstance(value, list | tuple) or not value:
        raise TypeError("it is empty or no list")
    return "root ::= " + " | ".join(json.dumps(_text(v), ensure_ascii=False) for v in value)


_SOURCES: dict[str, tuple[str, Callable[[Any], str], str]] = {
    "json": ("compile_json_schema", _schema, "a schema as a mapping or text, a pydantic model"),
    "json_object": ("compile_json_schema", _any_object, "True"),
    "regex": ("compile_regex", _text, "regexes without lookaround, backreferences and flags"),
    "choice": ("compile_grammar", _literals, "a list of texts"),
    "grammar": ("compile_grammar", _text, "EBNF with a rule root"),
}
"""For each key: the method of xgrammar's compiler, what it is given, and what a caller may give."""
