"""The benchmark of latent attention, small and interpreted: it runs, and results are equal."""

import json
import math

import pytest
import torch

from attn_ops import AttentionSpec
from attn_ops.backends.measure import MeasuredShape
from attn_ops.backends.triton import BACKEND
from benchmarks import mla
from benchmarks.attention import kv_bytes
from tests.kit.marks import long, slow

pytestmark = pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET")


@pytest.mark.parametrize(
    ("what", "shape", "count"),
    [*slow(("decode", "2x40", 1)), *long(("ways", "10x40", 2), ("chunks", "10x200", 2))],
)
def test_runs(what, shape, count, tmp_path, capsys):
    path = tmp_path / "mla.json"
    small = "--device cpu --heads 4 --rounds 1 --block-size 16 --sizes 32 16 16 16"
    mla.main([what, *small.split(), "--shapes", shape, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert all(len(row) == count for row in rows.values())
    assert rows
    assert "differs" not in capsys.readouterr().out


def test_kernels_of_a_layer_are_found_in_a_step():
    layer = ["absorb", "attend", "attend"]
    names = ["norm", *layer, "product", "absorb", *layer, "attend"]
    step = [(name, 10.0 * (at + 1)) for at, name in enumerate(names)]
    assert mla.spans_of(step, layer) == [30.0, 30.0]
    first, second = mla.spans_of(step[1:], layer)
    assert math.isnan(first), "nothing has ended before it"
    assert second == 30.0
    assert mla.spans_of(step, []) == []


def test_latents_of_deepseek():
    spec = AttentionSpec.of_latent(128, mla.DEEPSEEK, torch.bfloat16)
    assert kv_bytes(mla.shape_of("decode", "2x1000"), spec) == 2 * 1000 * 576 * 2
    assert mla.shape_of("ways", "8x1000") == MeasuredShape(1, 8, 1000)
