"""The benchmark of latent attention, small and interpreted: it runs, and its kernels are right."""

import json
import math

import pytest
import torch

from attn_ops.backends.triton import BACKEND
from benchmarks.mla import __main__ as program
from benchmarks.mla.inputs import Shape, make_layers
from benchmarks.mla.step import layer_of, spans_of
from tests.kit.marks import long, slow

pytestmark = pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET")

SMALL = ["--device", "cpu", "--heads", "4", "--rounds", "1", "--block-size", "16",
         "--sizes", "32", "16", "16", "16", "--seconds", "1000"]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "shape"),
    [("tune", "2x40"),
     *slow(("decode", "2x40"), ("ways", "10x40")),
     *long(("prompts", "10x40"), ("project", "2x40"), ("chunks", "10x200"))],
)  # fmt: skip
def test_runs(what, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "matmul_rate", lambda device: 1e12)
    path = tmp_path / "mla.json"
    program.main([what, *SMALL, "--shapes", shape, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    timed = [row for row in rows if row["us"] == row["us"]]
    assert timed
    assert all(row.get("error", 0.0) < 0.02 for row in timed)


def test_kernels_of_a_layer_are_found_in_a_step():
    one = [("absorb", 1.0), ("attend", 5.0), ("attend", 2.0)]
    assert layer_of(one * 3, 3) == ["absorb", "attend", "attend"]
    with pytest.raises(ValueError, match="each of 2 layers must run the same kernels, got 5"):
        layer_of([*one, *one[:2]], 2)
    names = ["norm", *layer_of(one, 1), "product", "absorb", *layer_of(one, 1), "attend"]
    step = [(name, 10.0 * (at + 1)) for at, name in enumerate(names)]
    assert spans_of(step, layer_of(one, 1)) == [30.0, 30.0]
    first, second = spans_of(step[1:], layer_of(one, 1))
    assert math.isnan(first), "nothing has ended before it"
    assert second == 30.0
    assert spans_of(step, []) == []


@pytest.mark.slow
def test_a_step_says_why_it_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "matmul_rate", lambda device: 1e12)
    path = tmp_path / "mla.json"
    program.main(["step", *SMALL, "--shapes", "2x40", "--json", str(path)])
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert "device" in rows["FLASHINFER_MLA"]["reason"]


def test_counts():
    """DeepSeek-V3: 128 heads, one token over 1,000 keys."""
    shape = Shape(128, 2, 1000)
    assert shape.kv_bytes == 2 * 1000 * 576 * 2
    assert shape.weight_bytes == 128 * 256 * 512 * 2
    assert shape.decode_flops == 2 * 128 * 2000 * (576 + 512)
    assert Shape(1, 1, 10, query_len=4).pairs == 7 + 8 + 9 + 10


def test_first_request_is_attention():
    layers = make_layers(
        Shape(4, 2, 20, 2, block_size=16, latent=program.LatentShape(32, 16, 16, 16)),
        torch.device("cpu"),
    )
    out = layers.first_request()
    kv = layers.caches[0][layers.common.block_table_tensor[0].long()].flatten(0, 1)[:20].float()
    q = torch.cat([layers.ql_nope[0], layers.q_pe(0)], 2)[0, 3].float()
    weights = (kv[:19] @ q * layers.shape.scale).softmax(0)
    torch.testing.assert_close(out[0, 3], weights @ kv[:19, :32], rtol=1e-4, atol=1e-4)
