"""The benchmark of what requests ask for runs; on a CPU its figures mean nothing."""

import json

import pytest

from benchmarks import options


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    pytest.importorskip("xgrammar")
    path = tmp_path / "options.json"
    sizes = ["--batch", "2", "--context", "20", "--steps", "5", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["options", "--device", "cpu", *sizes, "--json", str(path)])
    options.main()
    result = json.loads(path.read_text())
    assert set(result["rows"]) == {*options.cases(10), "prompts", "score"}
    assert result["rows"]["greedy"]["ratio"] == result["rows"]["prompts"]["ratio"] == 1
