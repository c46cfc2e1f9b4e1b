"""docs/models.md: what it counts, that it is whole, and that it is what a run writes."""

import multiprocessing
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from benchmarks.model_type_configs import PREFIX, classes, plain
from benchmarks.model_types import prepared_types, run_all
from benchmarks.model_types_page import page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
VERSION = re.search(r"Transformers (\S+) was built", PAGE.read_text())[1]
same_version = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"the page is of Transformers {VERSION}"
)


CAUSAL = ("Equal", "Refused", "Not built")
IMAGES = tuple(f"Images and text: {title.lower()}" for title in CAUSAL)
ROWS = {"causal": CAUSAL, "images and text": IMAGES}


def sections(text: str | None = None) -> dict[str, list[str]]:
    """Types by the heading that they are under, as often as they are named; of docs/models.md."""
    text = PAGE.read_text() if text is None else text
    parts = re.split(r"^## (.*) \(\d+\)$", text, flags=re.MULTILINE)
    return {
        title: re.findall(r"`([\w.-]+)`(?=,| \||\n)", text.replace("| why | types |", ""))
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def counts(titles: tuple[str, ...]) -> list[int]:
    """Types of each section, all of them first."""
    numbers = [len(sections()[title]) for title in titles]
    return [sum(numbers), *numbers]


def test_counts():
    named, text = sections(), PAGE.read_text()
    assert set(named) == {*CAUSAL, *IMAGES}  # none is wrong, none crashed
    for name, titles in ROWS.items():
        numbers = " | ".join(map(str, counts(titles)))
        assert f"\n| {name} | {numbers} | 0 |\n" in text
    for title, types in named.items():
        assert f"## {title} ({len(types)})" in text
    assert len(named["Equal"]) >= 105
    assert len(named["Images and text: equal"]) >= 50


def test_the_readme_says_the_counts():
    words = " ".join((ROOT / "README.md").read_text().split())
    total, equal, refused, _ = counts(CAUSAL)
    assert f"{equal} of {total} causal model types" in words
    assert f"Of the {total} types, {refused} are refused" in words
    total, equal, *_ = counts(IMAGES)
    assert f"the text part of {equal} of {total} types that read images" in words


@same_version
def test_every_type_is_on_the_page_once():
    for prefix, titles in (("", CAUSAL), (PREFIX, IMAGES)):
        named = [prefix + name for title in titles for name in sections()[title]]
        assert sorted(named) == sorted(n for n in classes() if n.startswith(PREFIX) == bool(prefix))


def test_a_class_is_counted_once():
    causal = [(n, c) for n, c in classes().items() if not n.startswith(PREFIX)]
    assert causal == list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    composite = {plain(n): c for n, c in classes().items() if n.startswith(PREFIX)}
    assert not composite.items() & set(causal)
    for name, kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        assert kind in (composite.get(name), dict(causal).get(name))


@pytest.mark.slow
@same_version
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")
def test_the_page_is_what_a_run_writes():
    """Of every 24th type: all of them take 8 minutes, and `make models` runs them."""
    types = prepared_types()[::24]
    found = sections(page(list(run_all(types, jobs=2, timeout=300))))
    for titles, start in ((CAUSAL, ""), (IMAGES, PREFIX)):
        ran = {plain(name) for name in types if name.startswith(PREFIX) == bool(start)}
        for title in titles:
            assert set(found.pop(title, [])) == ran & set(sections()[title]), "make models"
    assert found == {}, "none is wrong, none crashed"
