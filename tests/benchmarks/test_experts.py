"""The benchmark of experts on a CPU, where sizes are tiny."""

import json

import pytest

from benchmarks import experts

pytest.importorskip("transformers")


def test_every_shape_is_measured(tmp_path, monkeypatch):
    path = tmp_path / "experts.json"
    command = ["experts", "--device", "cpu", "--json", str(path), "--rows", "1", "5"]
    monkeypatch.setattr("sys.argv", command)
    experts.main()
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 2 * len(experts.SHAPES)
    assert all(row["difference"] < 0.1 for row in result["rows"].values()), result["rows"]
