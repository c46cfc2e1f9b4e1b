"""The backend of docs/adding_a_backend.md conforms as it is there, installed as another package."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from attn_ops import backend_names, get_backend, select_backend, support_table, varlen_metadata
from attn_ops.backends import registry
from attn_ops.testing import check_backend, conformance_cases
from tests.attn_ops.backends.test_registry import PLAIN

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_backend.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The page's module and its entry point, as pip would leave them."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "attention.py").write_text(BLOCKS[0])
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    points = "[attn_ops.backends]\nMY_BACKEND = my_package.attention:BACKEND\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", importlib.metadata.entry_points)
    yield "MY_BACKEND"
    for module in ("my_package", "my_package.attention"):
        sys.modules.pop(module, None)


def test_the_page_s_backend_conforms(installed):
    backend = get_backend(installed)
    assert check_backend(backend) == len(conformance_cases(backend)) > 100


def test_the_page_s_backend_is_short():
    """What an engineer must write, without blank lines."""
    assert sum(bool(line.strip()) for line in BLOCKS[0].splitlines()) <= 31


def test_a_probe_that_raises_is_a_reason_and_stops_nobody_else(installed, tmp_path):
    text = BLOCKS[0] + "\n\ndef probe():\n    import no_such_library\n"
    text += "\n\nBACKEND = __import__('dataclasses').replace(BACKEND, unavailable=probe)\n"
    (tmp_path / "my_package" / "attention.py").write_text(text)
    (row,) = [r for r in support_table.support_rows() if r.cells[0] == installed]
    assert row.unavailable == (
        "its unavailable() raised ModuleNotFoundError: No module named 'no_such_library'"
    )
    selection = select_backend(PLAIN, block_size=16, device="cpu")
    assert selection.backend.name == "TORCH"
    assert selection.reasons_against[installed][0] == row.unavailable
    with pytest.raises(ValueError, match="MY_BACKEND must run here to be checked, got: its unava"):
        check_backend(get_backend(installed))


def test_the_page_s_test_collects_and_runs_a_case(installed):
    scope = {}
    exec(BLOCKS[1], scope)
    mark = scope["test_conformance"].pytestmark[0]
    cases = mark.args[1]
    assert {mark.kwargs["ids"](case).split("-")[:2] == ["MY_BACKEND", "cpu"] for case in cases}
    scope["test_conformance"](cases[0])


def test_an_installed_backend_changes_nothing_of_ours(installed):
    """Neither the page's table nor the choice; the suite of ours does not run it."""
    from tests.conformance.test_conformance import all_cases

    names = {case.values[0].backend.name for case in all_cases()}
    assert installed in backend_names()
    assert installed not in names
    assert installed not in support_table.markdown()
    selection = select_backend(PLAIN, block_size=16, device="cpu")
    assert selection.backend.name == "TORCH"
    assert installed in selection.reasons_against


def test_a_broken_installation_is_a_row_with_its_reason(installed, tmp_path):
    (tmp_path / "my_package" / "attention.py").write_text("import no_such_library")
    (row,) = [r for r in support_table.support_rows() if r.cells[0] == installed]
    assert row.unavailable is not None
    assert "no_such_library" in row.unavailable
    assert len(row.cells) == len(support_table.COLUMNS)
    assert varlen_metadata([3], PLAIN).backend.name == "TORCH"
    with pytest.raises(ValueError, match=r"MY_BACKEND: it cannot be loaded.*no_such_lib"):
        varlen_metadata([3], PLAIN, "meta")


@pytest.mark.slow
def test_the_suite_is_not_imported_by_attn_ops():
    from tests.test_architecture import in_a_new_process

    code = "import json, sys, attn_ops; print(json.dumps('attn_ops.testing' in sys.modules))"
    assert in_a_new_process(code) is False
