"""quantize_output behind latent attention: the same forms, rewritten to the same bits."""

import pytest
import torch

from attn_ops import LatentShape
from fx_passes.passes.quantize_output import QuantizeOutput
from tests.fx_passes.passes.quantize_models import SCALE, Behind, given, group, row
from tests.kit.latent import build_latent_batch

ops = torch.ops.attn_ops
SHAPE = LatentShape(16, 8, 4, 128)


class BehindLatent(Behind):
    """The graph of latent attention, and of what stands behind it."""

    attend = staticmethod(ops.mla_attention)

    def _behind(self, q, kv_cache, *more):
        made = self.batch
        keywords = {"v_head_dim": SHAPE.v_head_dim, **self.keywords}
        out = self.attend(q, kv_cache, made.meta, made.kv_b, 0.3, **keywords)
        out = out if isinstance(out, torch.Tensor) else out[0]
        return self.function(out.unsqueeze(0).reshape(1, q.shape[0], -1), *more)


def batch():
    """Padding rows too."""
    sizes = {"shape": SHAPE, "dtype": torch.bfloat16, "num_padding_rows": 2}
    return build_latent_batch([1, 5, 2], [7, 5, 9], num_heads=2, **sizes)


@pytest.mark.parametrize(
    ("function", "more", "scheme"),
    [
        (row, (), "fp8_row"),
        (group, (), "fp8_group128"),
        (given, (SCALE,), "fp8_static"),
    ],
)
def test_recognised(function, more, scheme):
    behind = BehindLatent(batch(), function, *more, causal=True)
    wanted, one = behind.run(), QuantizeOutput("always")
    assert one.run(behind.graph) == 1, one.skipped
    assert all(torch.equal(a, b) for a, b in zip(behind.run(), wanted, strict=True))
    (node,) = behind.graph.find_nodes(op="call_function", target=ops.mla_attention_quant.default)
    asked = {k: node.kwargs[k] for k in ("scheme", "v_head_dim", "causal")}
    assert asked == {"scheme": scheme, "v_head_dim": 128, "causal": True}
    assert not behind.graph.find_nodes(op="call_function", target=ops.mla_attention.default)
    assert one.summary() == f"attention writes {scheme}"
    again = QuantizeOutput("always")
    assert (again.run(behind.graph), again.skipped) == (0, [])


def test_with_lse_is_left_alone():
    class WithLSE(BehindLatent):
        attend = staticmethod(ops.mla_attention_with_lse)

    behind, one = WithLSE(batch(), row), QuantizeOutput("always")
    assert one.run(behind.graph) == 0
    assert "mla_attention_with_lse has no quantized form" in one.skipped[0]
