"""docs/models.md: what came of every causal model type."""

import collections
import textwrap
from collections.abc import Sequence

from benchmarks.model_type_configs import PREFIX, plain
from benchmarks.model_type_run import Outcome

HEAD = """# Models

Every causal model type of Transformers {version} was built small, with random weights, and decoded
in a `DecodeSession`; so was every type that reads images and text, which was given text alone.
`equal`: the tokens and logits of all prompts are those of the model's own `generate`. `refused`:
the session, or the model's constructor, raised an error that says why.

| types | all | equal | refused | not built | wrong or crashed |
|---|---|---|---|---|---|
{counts}

`make models` writes this page; a test compares it with what the installed Transformers does.

A type stands here for its decoder. Some causal types are the text part of a model that also reads
images or sound. A name is in both lists where the two classes differ.
"""

REASONS = (
    ("layer_types must be supported", "layers that select keys, or of a type of their own"),
    ("layers with a state must", "layers with a state whose code is their own"),
    ("model must have layers that attend", "attention code of their own, or none"),
    ("attention layers must have head_dim", "layers without a head_dim"),
    ("attention_mask must be left to the batch's", "they make a padding mask themselves"),
    ("attention_mask must reach attention", "they compute with the mask"),
    ("logits must have shape", "they compute logits of all rows"),
    (" must attend once in a forward", "a layer attends more than once"),
    ("must be given the mask that its options", "the mask is not what the layer's options say"),
    ("position_ids must count from 0", "their own `generate` counts positions otherwise"),
    ("model must be a decoder alone", "an encoder with a decoder"),
    ("position_bias must be None", "attention with a position bias"),
    ("No module named 'scipy'", "Transformers asks for scipy"),
    ("max_tokens must be at most the model's", "their config has no number of positions"),
    ("must attend over a key a row", "they attend over other rows than a sequence's own"),
    ("pip install timm", "Transformers asks for timm"),
    ("attn_implementation must not be", "text sees an image in both directions"),
)
"""What an error message begins with or holds, and its reason in a few words."""


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole page."""
    from transformers import __version__ as version  # slow

    causal = [o for o in outcomes if not o.model_type.startswith(PREFIX)]
    images = [o for o in outcomes if o.model_type.startswith(PREFIX)]
    counts = f"{_counts('causal', causal)}\n{_counts('images and text', images)}"
    parts = [HEAD.format(version=version, counts=counts), *_sections(causal)]
    return "\n".join(parts + _sections(images, "Images and text: "))


def _counts(name: str, outcomes: Sequence[Outcome]) -> str:
    """A row of the table."""
    found = collections.Counter(outcome.kind for outcome in outcomes)
    numbers = [found[kind] for kind in ("equal", "refused", "unbuildable")]
    numbers = [len(outcomes), *numbers, found["wrong"] + found["crash"]]
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def _sections(outcomes: Sequence[Outcome], start: str = "") -> list[str]:
    """Headings, which begin so, and lists of some types."""

    def heading(words: str, number: int) -> str:
        return f"## {start + words if start else words.capitalize()} ({number})\n"

    equal = [o.model_type for o in outcomes if o.kind == "equal"]
    wrapped = textwrap.fill(_listed(equal), 100, break_on_hyphens=False)
    parts = [heading("equal", len(equal)), wrapped, ""]
    for kind, title in (("refused", "refused"), ("unbuildable", "not built")):
        rows = [o for o in outcomes if o.kind == kind]
        if rows:
            parts += [heading(title, len(rows)), _table(rows), ""]
    wrong = [f"{o.model_type} ({o.kind})" for o in outcomes if o.kind in ("wrong", "crash")]
    if wrong:
        parts += [heading("wrong or crashed", len(wrong)), _listed(wrong), ""]
    return parts


def _table(outcomes: Sequence[Outcome]) -> str:
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        groups.setdefault(reason_of(outcome), []).append(outcome.model_type)
    rows = sorted(groups.items(), key=lambda item: -len(item[1]))
    lines = [f"| {reason} | {_listed(names)} |" for reason, names in rows]
    return "\n".join(["| why | types |", "|---|---|", *lines])


def reason_of(outcome: Outcome) -> str:
    """In a few words; the message itself, where there are none for it."""
    text = " ".join(outcome.reason.split())
    known = (words for start, words in REASONS if start in text)
    return next(known, text.split(": ", 1)[-1].partition(", got")[0])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{plain(name)}`" for name in names)
