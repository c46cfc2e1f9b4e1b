"""The benchmark of small caches and shared prefixes, run on a CPU: its figures mean nothing."""

import json

import pytest

from benchmarks import memory


@pytest.mark.slow
def test_smoke_run(tmp_path, capsys):
    path = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--layers", "1", "--rounds", "1", "--commit", "none"]
    memory.main([*arguments, "--json", str(path)])
    printed = capsys.readouterr().out
    for text in ("small caches", "prompts that begin alike", "bars"):
        assert text in printed
    result = json.loads(path.read_text())
    assert [(row["part"], row["reserve"]) for row in result["small"]] == [
        (1.0, "need"), (0.5, "need"), (0.5, "length"), (0.25, "need"), (0.25, "length"),
    ]  # fmt: skip
    assert all(row["same_tokens"] > 0.5 for row in [*result["small"], *result["prefixes"]])
    assert [row["shares"] for row in result["prefixes"]] == [False, True]
    assert result["prefixes"][0]["found"] == 0.0
    assert result["prefixes"][1]["found"] > 0.5
    assert {bar["verdict"] for bar in result["bars"]} == {"not measured"}


def test_groups_begin_alike():
    wishes = memory.groups(3, 4, 20, 3, 64)
    assert len(wishes) == 12
    prefixes = {tuple(w.prompt[:20]) for w in wishes}
    assert len(prefixes) == 3
    assert {len(w.prompt) for w in wishes} == {23}
