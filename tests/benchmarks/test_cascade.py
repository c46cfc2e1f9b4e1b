"""The benchmark of shared prefixes, small and on a CPU: every way computes the same."""

import json

import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention, get_backend
from benchmarks import cascade
from graphs.step import shared


def test_it_runs(tmp_path, capsys):
    path = tmp_path / "cascade.json"
    asked = ["--cases", "3x32", "2x3x16", "--backends", "TORCH", "--rounds", "1"]
    cascade.main(["--device", "cpu", *asked, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["3x32", "2x3x16"]
    assert all(row[way] > 0 for row in rows for way in cascade.WAYS)
    assert "3x32" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["3", "3x20", "0x32", "1x2x3x4"])
def test_cases_of_another_form_are_refused(text):
    with pytest.raises(ValueError, match=r"case must be \[GROUPSx\]REQUESTSxSHARED"):
        cascade.Case.parse(text)


@pytest.mark.slow
def test_samples_of_a_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "LEAST_REQUESTS", 2)
    monkeypatch.setattr(shared, "LEAST_BYTES", 1)
    path = tmp_path / "cascade.json"
    asked = ["--cases", "--samples", "3x32", "--json", str(path)]
    cascade.main(["--device", "cpu", *asked])
    (row,) = json.loads(path.read_text())["samples"]
    assert row["graphs"] == ["decode 3", "decode 3, up to 2 prefixes apart"]


def test_shared_blocks_stand_for_equal_keys():
    """Plain attention over shared blocks is attention over copies of them, and cascade is both."""
    spec, torch_backend = AttentionSpec(2, 1, 8, torch.float64), get_backend("TORCH")
    q, results = torch.randn(3, 2, 8, dtype=torch.float64), []
    case = cascade.Case.parse("3x32")
    shared, num_blocks = cascade.table_of(case, 20, True)
    apart, num_apart = cascade.table_of(case, 20, False)
    cache = torch.randn(num_blocks, 2, 16, 1, 8, dtype=torch.float64)
    copies = cache.new_zeros(num_apart, 2, 16, 1, 8)
    copies[apart.long()] = cache[shared.long()]
    for table, kv_cache, prefix in ((shared, cache, 0), (apart, copies, 0), (shared, cache, 32)):
        common = CommonAttentionMetadata.from_lengths([1] * 3, [52] * 3, table, 16)
        meta = torch_backend.builder(torch_backend, [spec], 16, "cpu").build(prefix, common)
        results.append(attention(q, kv_cache, meta, 0.3))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0], rtol=1e-6, atol=1e-6)
