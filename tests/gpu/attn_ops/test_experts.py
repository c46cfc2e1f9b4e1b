"""Mixtures of experts on a GPU, at sizes of real models, called and captured.

Small sizes of every kind: tests/attn_ops/ops/moe/test_experts.py, which runs on a GPU too.
"""

import dataclasses

import pytest
import torch

from attn_ops.ops.moe.composite import dequantized
from attn_ops.ops.moe.constants import ExpertsConstants
from benchmarks.experts import GPT_OSS, SHAPES, Layer, routed

pytestmark = pytest.mark.gpu

REAL = {
    name: dataclasses.replace(shape, num_experts=min(shape.num_experts, 16))
    for name, shape in SHAPES.items()
}
REAL |= {f"{name}, FP8": dataclasses.replace(shape, fp8=True) for name, shape in REAL.items()}


@pytest.fixture(params=REAL)
def layer(request) -> Layer:
    torch.manual_seed(0)
    return Layer(REAL[request.param], "cuda")


def wanted(layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
    """Expert by expert in float64, on the GPU."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert in ids.unique().tolist():
        one, scale = slice(expert, expert + 1), layer.scales.get
        up, down = (
            w.mT if layer.is_transposed else w for w in (layer.gate_up_proj, layer.down_proj)
        )
        up = dequantized(up, scale("gate_up_scale"), torch.float64, one)[0].double().t()
        down = dequantized(down, scale("down_scale"), torch.float64, one)[0].double().t()
        rows, places = torch.where(ids == expert)
        both = x[rows].double() @ up
        both = both + layer.gate_up_proj_bias[expert] if layer.has_bias else both
        y = layer._apply_gate(both) @ down
        y = y + layer.down_proj_bias[expert] if layer.has_bias else y
        out.index_add_(0, rows, y * weights[rows, places, None].double())
    return out


def close(found, expected):
    bound = 2e-2 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found.double(), expected, atol=bound, rtol=0)


@pytest.mark.parametrize("rows", [1, 2, 17, 128, 700])
def test_equal_to_a_loop_in_float64(layer, rows):
    given = routed(layer.shape, rows, "cuda")
    close(layer.ours(*given), wanted(layer, *given))


def test_weights_of_unused_experts_are_not_read(layer):
    x, ids, weights = routed(layer.shape, 40, "cuda")
    ids = ids % (layer.num_experts // 2)
    expected = wanted(layer, x, ids, weights)
    for weight in (layer.gate_up_proj, layer.down_proj, *layer.scales.values()):
        weight[layer.num_experts // 2 :] = float("nan")
    close(layer.ours(x, ids, weights), expected)


def test_a_row_does_not_depend_on_the_others(layer):
    """Bit by bit, in blocks of 16, 32, 64 and 128 pairs."""
    x, ids, weights = routed(layer.shape, 2048, "cuda")
    whole = layer.ours(x, ids, weights)
    for begin, end in ((0, 1), (5, 7), (100, 164), (300, 800), (0, 2000)):
        part = layer.ours(x[begin:end], ids[begin:end], weights[begin:end])
        assert torch.equal(part, whole[begin:end]), (begin, end)


@pytest.mark.parametrize(
    "form",
    [
        (16, 64, 64, 4, 3),
        (32, 64, 128, 4, 3),
        (64, 64, 128, 4, 3),
        (64, 128, 64, 4, 3),
        (128, 256, 64, 8, 4),
    ],
)
def test_all_constants_give_the_same_bits(layer, form):
    from attn_ops.ops.triton.experts import launch_experts

    given = routed(layer.shape, 100, "cuda")
    up, down, biases, gate = layer.gate_up_proj, layer.down_proj, (), {}
    if layer.has_bias:
        up, down, gate = up.mT, down.mT, GPT_OSS
        biases = (layer.gate_up_proj_bias, layer.down_proj_bias)
    args = (given[0], up, down, *given[1:], *biases)
    if layer.shape.fp8:
        form = (form[0], min(form[1], 128), 128, form[3], 3)
    found = launch_experts(*args, constants=ExpertsConstants(*form), **gate, **layer.scales)
    assert torch.equal(found, layer.ours(*given))


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_a_captured_call_takes_changed_inputs(layer, rows):
    """Rows, routing and weights of the layer; nothing waits for the host."""
    given = routed(layer.shape, rows, "cuda")
    layer.ours(*given)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.ours(*given)
    for seed in range(3):
        torch.manual_seed(seed)
        changed = routed(layer.shape, rows, "cuda")
        if seed == 2:  # all rows to the same experts
            changed = (changed[0], changed[1][:1].expand(rows, -1), changed[2])
        for static, new in zip(given, changed, strict=True):
            static.copy_(new)
        layer.scales.get("down_scale", layer.down_proj).mul_(-1)
        graph.replay()
        assert torch.equal(out, layer.ours(*given))
        close(out, wanted(layer, *given))
