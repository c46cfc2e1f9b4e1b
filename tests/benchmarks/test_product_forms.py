"""The benchmark of products' forms on a CPU, where kernels are interpreted."""

import json

import pytest

pytest.importorskip("triton")

from benchmarks import product_forms


def test_every_form_is_tried(tmp_path, monkeypatch):
    path = tmp_path / "forms.json"
    command = ["product_forms", "--device", "cpu", "--json", str(path), "--products"]
    monkeypatch.setattr("sys.argv", [*command, "96x64", "64x32 norm addend gated"])
    monkeypatch.setattr(product_forms, "FORMS", product_forms.FORMS[:2])
    product_forms.main()
    rows = json.loads(path.read_text())["rows"]
    assert [len(row["best"]) for row in rows.values()] == [3, 3]
