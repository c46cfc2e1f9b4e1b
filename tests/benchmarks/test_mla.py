"""The benchmark of latent attention, small and interpreted: it runs, and results are equal."""

import json
import math

import pytest

from attn_ops.backends.triton import BACKEND
from benchmarks import mla
from tests.kit.marks import long, slow

pytestmark = pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET")


@pytest.mark.parametrize(
    ("what", "shape"),
    [("step", "2x40"), *slow(("decode", "2x40")), *long(("ways", "10x40"), ("chunks", "10x200"))],
)
def test_runs(what, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(mla, "matmul_rate", lambda device: 1e12)
    path = tmp_path / "mla.json"
    small = "--device cpu --heads 4 --rounds 1 --block-size 16 --sizes 32 16 16 16 --seconds 1000"
    backends = ["--backends", "FLASHINFER_MLA"] if what == "step" else []
    mla.main([what, *small.split(), *backends, "--shapes", shape, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    if what == "step":  # a GPU's alone
        assert "device" in rows[0]["reason"]
        return
    timed = [row for row in rows if row["us"] == row["us"]]
    assert timed
    assert all(row.get("error", 0.0) < 0.02 for row in timed)


def test_kernels_of_a_layer_are_found_in_a_step():
    layer = ["absorb", "attend", "attend"]
    names = ["norm", *layer, "product", "absorb", *layer, "attend"]
    step = [(name, 10.0 * (at + 1)) for at, name in enumerate(names)]
    assert mla.spans_of(step, layer) == [30.0, 30.0]
    first, second = mla.spans_of(step[1:], layer)
    assert math.isnan(first), "nothing has ended before it"
    assert second == 30.0
    assert mla.spans_of(step, []) == []


def test_counts():
    """DeepSeek-V3: 128 heads, one token over 1,000 keys."""
    shape = mla.Shape(128, 2, 1000)
    assert shape.kv_bytes == 2 * 1000 * 576 * 2
    assert shape.weight_bytes == 128 * 256 * 512 * 2
    assert shape.decode_flops == 2 * 128 * 2000 * (576 + 512)
    assert mla.Shape(1, 1, 10, query_len=4).pairs == 7 + 8 + 9 + 10
