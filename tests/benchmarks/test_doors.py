"""The benchmarks of doors run; on a CPU their figures mean nothing."""

import json

import pytest

from benchmarks import generate_batch, lm_eval, sleep


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (sleep, ["--gib", "0.001", "--batch", "4", "--rounds", "2"]),
        (generate_batch, ["--requests", "4", "--longest", "32", "--new", "8"]),
        (lm_eval, ["--questions", "8", "--context", "40", "--batch-sizes", "4"]),
    ],
    ids=["sleep", "generate_batch", "lm_eval"],
)
def test_it_runs(module, sizes, tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["it", "--device", "cpu", *sizes, "--json", str(path)])
    module.main()
    result = json.loads(path.read_text())
    assert result["rows"]
    assert result["command"].startswith(f"python -m {module.__name__} ")
