"""Grammars: random allowed tokens make texts that Python's own parsers take."""

import json
import random
import re

import numpy as np
import pytest

from graphs.requests.grammar import Grammars, GrammarState
from tests.kit.text import byte_level

pytest.importorskip("xgrammar")
pydantic = pytest.importorskip("pydantic")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SAMPLE = (
    '{"name": "Łódź", "age": 42, "tags": ["a", "b"], "ok": true}\n red green blue 2024-01-31 ' * 9
)
ROWS = 380
"""Rows of the logits: more than the tokenizer's vocabulary has tokens."""


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level([SAMPLE], 330, ("<eos>", "<pad>")),
        eos_token="<eos>",
        pad_token="<pad>",
    )


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, ROWS)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=130)
    tags: list[str] = pydantic.Field(max_length=3)
    ok: bool | None


SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "at": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["color", "at"],
}
REGEX = r"(19|20)\d{2}-[01]\d(-[0-3]\d)?( [a-z]{1,5})*"
CHOICE = ["red", "green", "greenish", 'a "b"\\\n', "Łódź 😀", "]|["]
EBNF = 'root ::= "(" root ")" | [0-9]+'


def is_person(text: str) -> bool:
    return set(json.loads(text)) == {"name", "age", "tags", "ok"} and bool(
        Person.model_validate_json(text)
    )


def is_color(text: str) -> bool:
    value = json.loads(text)
    numbers = [type(number) in (int, float) for number in value["at"]]
    return (
        set(value) == {"color", "at"} and value["color"] in ("red", "green") and len(numbers) == 2
    )


def is_nested(text: str) -> bool:
    depth = len(text) - len(text.lstrip("("))
    return re.fullmatch(rf"\({{{depth}}}\d+\){{{depth}}}", text) is not None


ASKED = {
    "pydantic": ({"json": Person}, is_person),
    "schema": ({"json": SCHEMA}, is_color),
    "schema's text": ({"json": json.dumps(SCHEMA)}, is_color),
    "object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"choice": CHOICE}, lambda text: text in CHOICE),
    "grammar": ({"grammar": EBNF}, is_nested),
}


def bits(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def row_of(state: GrammarState) -> np.ndarray:
    row = np.full(-(-ROWS // 32), 0x5A5A5A5A, np.int32)
    state.fill(row)
    return row


def draw(state: GrammarState, rng: random.Random, tokenizer) -> list[int]:
    """Random allowed tokens, up to eos; after 60 of them the text comes to its end."""
    tokens = []
    while len(tokens) < 1000:
        allowed = bits(row_of(state))
        assert allowed
        assert (allowed == [tokenizer.eos_token_id]) == state.is_done
        token = rng.choice(allowed)
        if len(tokens) > 60:  # closes what is open rather than adding more
            ends = [tokenizer.convert_tokens_to_ids(end) for end in '"}]),:1']
            token = next((end for end in ends if end in allowed), token)
        if tokenizer.eos_token_id in allowed and (len(tokens) > 60 or rng.random() < 0.5):
            token = tokenizer.eos_token_id
        state.accept(token)
        if token == tokenizer.eos_token_id:
            assert state.is_done
            assert bits(row_of(state)) == [token]
            return tokens
        tokens.append(token)
    raise AssertionError(tokenizer.decode(tokens))


@pytest.mark.parametrize("name", ASKED)
def test_random_allowed_tokens_are_valid(grammars, tokenizer, name):
    asked, is_valid = ASKED[name]
    texts = set()
    for seed in range(60):
        state = GrammarState(grammars.compile(asked))
        text = tokenizer.decode(draw(state, random.Random(seed), tokenizer))
        if "\N{REPLACEMENT CHARACTER}" in text:
            continue  # xgrammar takes bytes of a surrogate for a character; models do not write it
        assert is_valid(text), text
        texts.add(text)
    assert len(texts) > 4


@pytest.mark.parametrize("name", ASKED)
def test_rows_are_what_brute_force_says(grammars, tokenizer, name):
    """A token is allowed if and only if a copy of the state accepts it."""
    compiled, rng = grammars.compile(ASKED[name][0]), random.Random(3)
    tokens = draw(GrammarState(compiled), rng, tokenizer)
    for length in rng.sample(range(len(tokens) + 1), min(4, len(tokens))):
        accepted = []
        for token in range(ROWS):
            state = GrammarState(compiled)
            for before in tokens[:length]:
                state.accept(before)
            try:
                state.accept(token)
            except AssertionError:
                continue
            accepted.append(token)
        state = GrammarState(compiled)
        for before in tokens[:length]:
            state.accept(before)
        assert bits(row_of(state)) == accepted


def test_special_tokens_are_no_text(grammars, tokenizer):
    state = GrammarState(grammars.compile({"regex": ".*"}))
    allowed = bits(row_of(state))
    assert tokenizer.eos_token_id in allowed
    assert tokenizer.pad_token_id not in allowed
    assert max(allowed) < len(tokenizer)
    assert not state.is_done


def test_strings_with_a_length_have_no_control_characters(grammars, tokenizer):
    """xgrammar's own grammar for them allows a tab, which JSON forbids."""
    state = GrammarState(grammars.compile({"json": {"type": "string", "maxLength": 3}}))
    state.accept(tokenizer.convert_tokens_to_ids('"'))
    texts = [tokenizer.decode([token]) for token in bits(row_of(state))]
    assert "a" in texts
    assert not any(char < " " for text in texts for char in text)


def test_stop_tokens_of_the_session(tokenizer):
    grammars = Grammars(tokenizer, ROWS, stop_token_ids={1, 7})
    state = GrammarState(grammars.compile({"choice": ["a"]}))
    state.accept(tokenizer("a")["input_ids"][0])
    assert bits(row_of(state)) == [1, 7]
    state.accept(7)
    state.accept(7)  # after the end nothing changes
    assert state.is_done


@pytest.mark.parametrize("name", ASKED)
def test_drafted_rows_are_those_of_steps(grammars, tokenizer, name):
    compiled, rng = grammars.compile(ASKED[name][0]), random.Random(5)
    tokens = [*draw(GrammarState(compiled), rng, tokenizer), tokenizer.eos_token_id]
    state, at = GrammarState(compiled), 0
    while at < len(tokens):
        draft = tokens[at : at + rng.randrange(5)]
        wrong = rng.random() < 0.5
        draft = [*draft, tokenizer.pad_token_id, 5] if wrong else draft
        rows = np.zeros((1 + len(draft), -(-ROWS // 32)), np.int32)
        state.fill_drafted(rows, draft)
        for row, token in zip(rows, [*draft, None], strict=True):
            assert row.tolist() == row_of(state).tolist()
            if token in (tokenizer.pad_token_id, None):
                break
            state.accept(token)
            at += 1
        assert not wrong or (rows[-2:] == -1).all()


def test_the_same_grammar_is_compiled_once(grammars):
    compiled = grammars.compile({"json": SCHEMA})
    assert grammars.compile({"json": json.loads(json.dumps(SCHEMA))}) is compiled
    assert grammars.compile({"json": json.dumps(SCHEMA, indent=1)}) is compiled
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}
    assert grammars.compile({"json": turned}) is not compiled


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("red", "must be a mapping with one key, got 'red'; supported: json, json_object, regex"),
        ({}, "must be a mapping with one key, got {}"),
        ({"regexp": "a"}, "must be a mapping with one key, got {'regexp': 'a'}"),
        ({"regex": "a", "choice": ["a"]}, "must be a mapping with one key"),
        ({"json": {"type": "strin"}}, "got {'type': 'strin'}: Unsupported type \"strin\"; supp"),
        ({"json": "{"}, "got '{': Expecting property name"),
        ({"json": 5}, "got 5: Schema should be an object or bool"),
        ({"json_object": False}, "must have a json_object that xgrammar takes, got False"),
        ({"regex": "(a"}, "got '(a': Regex parsing error at position 3: The parenthesis is not"),
        ({"regex": 5}, "must have a regex that xgrammar takes, got 5: it is not text"),
        ({"choice": []}, "must have a choice that xgrammar takes, got []: it is empty"),
        ({"choice": "red"}, "got 'red': it is empty or no list; supported: a list of texts"),
        ({"choice": ["a", 5]}, "got ['a', 5]: it is not text"),
        ({"grammar": "root ::= a"}, 'Rule "a" is not defined; supported: EBNF'),
    ],
)
def test_bad_values_are_named(grammars, asked, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        grammars.compile(asked)
    assert "structured_outputs" in str(error.value)
    assert "supported: " in str(error.value)


@pytest.mark.parametrize(
    ("schema", "skipped"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"minimum": 5}, "minimum"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf of numbers"),
        ({"type": "string", "pattern": "a*", "minLength": 2}, "minLength beside pattern"),
        ({"type": "string", "pattern": "(?!a)[a-z]"}, "lookaround in a pattern"),
        ({"allOf": [{"type": "string"}, {"type": "string"}]}, "all but one of allOf"),
        ({"type": "object", "required": ["a"]}, "required names that are no properties"),
        ({"type": "array", "items": {"anyOf": [{"type": "array", "uniqueItems": True}]}}, "unique"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "minimum": 3}, "minimum"),
        ({"$ref": "https://json-schema.org/schema"}, "$ref to another document"),
        ({"type": "integer", "enum": [1, 2], "minimum": 2}, "minimum"),
        ({"type": "string", "const": "abc", "maxLength": 2}, "maxLength"),
        ({"type": "string", "enum": ["a", 3]}, "type beside enum"),
        ({"type": "integer", "const": True}, "type beside const"),
        ({"type": "string", "anyOf": [{"type": "string"}, {"const": 5}]}, "type beside anyOf"),
    ],
)
def test_keywords_that_would_be_skipped_are_named(grammars, schema, skipped):
    with pytest.raises(ValueError, match=re.escape(f"it would skip {skipped}")):
        grammars.compile({"json": schema})


def test_types_beside_values_and_schemas_of_that_type(grammars):
    grammars.compile({"json": {"type": ["string", "null"], "enum": ["a", None]}})
    named = {"$defs": {"a": {"type": "object"}}, "type": "object"}
    grammars.compile({"json": named | {"oneOf": [{"type": "object"}, {"$ref": "#/$defs/a"}]}})


def test_names_of_properties_are_no_keywords(grammars):
    named = {"not": {"type": "string"}, "pattern": {"const": {"not": 1}}, "if": {"type": "null"}}
    grammars.compile({"json": {"type": "object", "properties": named, "required": ["not"]}})


def test_without_a_tokenizer(tokenizer):
    with pytest.raises(ValueError, match="structured_outputs must come with a tokenizer"):
        Grammars(None, 64).compile({"regex": "a"})
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no eos token"):
        Grammars(bare, len(bare)).compile({"regex": "a"})
