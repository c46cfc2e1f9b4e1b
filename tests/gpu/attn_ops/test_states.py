"""Operators of layers with a state on a GPU, at sizes of real models, called and captured.

Compared with plain PyTorch on the CPU in float64. Small sizes of every kind:
tests/attn_ops/ops/test_state_kernels.py, which runs on a GPU too.
"""

import pytest
import torch

from benchmarks.state_layers import LAYERS, Layer

pytestmark = pytest.mark.gpu

LENGTHS = [1, 1, 0, 1, 33, 1, 7]
SEEN = [5, 1, 4, 100, 0, 0, 12]
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def requests_of(layer: Layer) -> tuple[torch.Tensor, ...]:
    """Decodes beside chunks of prompts; the sixth is padding."""
    lens, device = torch.tensor(LENGTHS), layer.states.device
    slots = torch.tensor([3, 1, 8, 2, 7, 0, 5])
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    return tuple(x.int().to(device) for x in (slots, starts, lens + torch.tensor(SEEN)))


def close(mine: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    bound = BOUNDS[dtype] * max(1.0, theirs.abs().nan_to_num(0.0).max().item())
    torch.testing.assert_close(mine.cpu().double(), theirs, atol=bound, rtol=0, equal_nan=True)


def poisoned(layer: Layer) -> Layer:
    for slot in (0, 4, 6, 7, 9):  # nobody's, and that of the request that begins
        layer.states[slot] = float("nan")
    return layer


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", LAYERS)
def test_equal_to_plain_pytorch_in_float64(name, dtype):
    layer = poisoned(LAYERS[name](sum(LENGTHS), 9, "cuda", dtype))
    requests = requests_of(layer)
    wide = layer.moved("cpu", torch.float64)
    want = wide.run(*(x.cpu() for x in requests))
    out = layer.run(*requests)
    assert out.dtype == dtype
    close(out, want, dtype)
    close(layer.states, wide.states, dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_launch_is_right_for_other_requests(name):
    """It is captured on padding, which changes no state; nothing waits for the host."""
    dtype = torch.bfloat16
    layer = poisoned(LAYERS[name](sum(LENGTHS), 9, "cuda", dtype))
    wide, before = layer.moved("cpu", torch.float64), layer.states.clone()
    requests = requests_of(layer)
    inputs = [torch.zeros_like(x) for x in requests]
    inputs[1].copy_(requests[1])
    layer.run(*inputs)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(*inputs)
    graph.replay()
    torch.testing.assert_close(layer.states, before, rtol=0, atol=0, equal_nan=True)
    assert not out.any()
    for mine, theirs in zip(inputs, requests, strict=True):
        mine.copy_(theirs)
    graph.replay()
    close(out, wide.run(*(x.cpu() for x in requests)), dtype)
    close(layer.states, wide.states, dtype)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "ssd_state_update"])
def test_long_prompts_by_blocks(name, keeps):
    """Beside decodes, called and captured; states behind some rows are kept."""
    lens, seen = torch.tensor([1, 200, 1, 0, 333, 5]), torch.tensor([5, 0, 7, 9, 64, 0])
    layer = poisoned(LAYERS[name](int(lens.sum()), 16, "cuda", torch.bfloat16))
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    requests = [torch.tensor([3, 1, 8, 2, 7, 5]).int(), starts, (lens + seen).int()]
    if keeps:
        kept = torch.zeros(int(lens.sum()), dtype=torch.int32)
        for slot, row in enumerate([16, 32, 33, 200, 202, 450, 537], 10):
            kept[row] = slot
        requests.append(kept)
    layer.states[7] = layer.states[3]  # it goes on
    wide, before = layer.moved("cpu", torch.float64), layer.states.clone()
    want = wide.run(*requests)
    on_gpu = [x.cuda() for x in requests]
    out = layer.run(*on_gpu)
    close(out, want, torch.bfloat16)
    close(layer.states, wide.states, torch.bfloat16)
    after = layer.states.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = layer.run(*on_gpu)
    layer.states.copy_(before)
    graph.replay()
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    torch.testing.assert_close(layer.states, after, rtol=0, atol=0, equal_nan=True)
