"""docs/models.md: what it counts, that it is whole, and that it is what a run writes."""

import multiprocessing
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_type_run import Options
from benchmarks.model_types import prepared_types, run_all
from benchmarks.model_types_page import page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
VERSION = re.search(r"Transformers (\S+) was built", PAGE.read_text())[1]
same_version = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"the page is of Transformers {VERSION}"
)


def sections() -> dict[str, list[str]]:
    """Types by the heading that they are under, as often as they are named."""
    parts = re.split(r"^## (.*) \(\d+\)$", PAGE.read_text(), flags=re.MULTILINE)
    return {
        title: re.findall(r"`([\w.-]+)`", text.replace("| why | types |", ""))
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_counts():
    named = sections()
    assert set(named) <= {"Equal", "Refused", "Not built"}  # none is wrong, none crashed
    text = PAGE.read_text()
    total = sum(map(len, named.values()))
    assert re.search(r"^(\d+) types: (\d+) equal", text, flags=re.MULTILINE).groups() == (
        str(total),
        str(len(named["Equal"])),
    )
    for title, types in named.items():
        assert f"## {title} ({len(types)})" in text
    assert len(named["Equal"]) >= 105


def test_the_readme_says_the_counts():
    named = sections()
    total, words = sum(map(len, named.values())), " ".join((ROOT / "README.md").read_text().split())
    assert f"{len(named['Equal'])} of {total} causal model types" in words
    assert f"Of the {total} types, {len(named['Refused'])} are refused" in words


@same_version
def test_every_causal_type_is_on_the_page_once():
    named = [name for types in sections().values() for name in types]
    assert sorted(named) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.slow
@pytest.mark.timeout(2400)  # 4 minutes of CPU and more
@same_version
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")
def test_the_page_is_what_a_run_writes():
    types = prepared_types()
    outcomes = sorted(
        run_all(types, Options(), jobs=2, timeout=300), key=lambda o: types.index(o.model_type)
    )
    assert page(outcomes) == PAGE.read_text(), "make models"
