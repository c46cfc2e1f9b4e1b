"""batch_invariant in real models: no sum of a row is left to a library or to a compiler."""

import pytest
import torch

pytest.importorskip("transformers")

import attn_ops.ops.products.fused_products as fused
import attn_ops.ops.products.skinny_mm as skinny
from fx_passes import Recorder, recording
from graphs import DecodeSession
from tests.kit.marks import long, slow
from tests.kit.models import build_model

PASSES = ("skinny_products.takes_ordered", "rms_norms.takes_ordered")
SUMS = ("aten.mean", "aten.sum", "aten.var_mean", "aten.rsqrt", "aten.mm", "aten.addmm", "aten.bmm")


@pytest.mark.parametrize("name", ["qwen3", *slow("gemma3"), *long("llama", "gemma2", "phi3")])
def test_no_sum_is_left(name, monkeypatch):
    """As on a Hopper GPU, whose products are stood for by PyTorch's."""
    for one in PASSES:
        monkeypatch.setattr(f"fx_passes.passes.{one}", lambda *_: True)
    for module in (fused, skinny):
        monkeypatch.setattr(module, "ordered_product", lambda x, w, b: skinny.product(x, w, b))
    torch._dynamo.reset()
    model = build_model(name, dtype=torch.bfloat16)
    compiled = torch.compile(
        model, backend="attn_ops", fullgraph=True, options={"batch_invariant": True}
    )
    with recording(Recorder(texts=True)) as recorder:
        DecodeSession(compiled, max_batch_size=2, max_tokens=32).generate([[1, 2, 3]], 4)
    assert recorder.final_graphs
    for _, text in recorder.final_graphs:
        left = [line for line in text.splitlines() if any(f"{s}." in line for s in SUMS)]
        assert not left
