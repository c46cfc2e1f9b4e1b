"""The benchmark of experts on a CPU, where sizes are tiny."""

import json

import pytest

from benchmarks import experts, experts_forms

pytest.importorskip("transformers")


def test_every_shape_is_measured(tmp_path, monkeypatch):
    path = tmp_path / "experts.json"
    command = ["experts", "--device", "cpu", "--json", str(path), "--rows", "1", "5"]
    monkeypatch.setattr("sys.argv", command)
    experts.main()
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 2 * len(experts.SHAPES)
    assert all(row["difference"] < 0.1 for row in result["rows"].values()), result["rows"]


def test_forms_are_tried(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    path = tmp_path / "forms.json"
    command = ["experts_forms", "--device", "cpu", "--json", str(path), "--rows", "1", "9"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(experts_forms, "NUM_LAYERS", 1)
    experts_forms.main()
    for row in json.loads(path.read_text())["rows"].values():
        assert row["product 1"]["best"]
        assert row["product 2"]["best"]
