"""top_experts beside PyTorch in float64: by the kernel, by PyTorch, and what it refuses."""

import itertools

import pytest
import torch

from attn_ops import top_experts
from attn_ops.ops.triton.top_experts import launch_top_experts
from tests.kit.operators import bits, opcheck

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cuts bfloat16
NAN, INF = float("nan"), float("inf")
KINDS = list(itertools.product((False, True), ("scores", "sum", "softmax")))
SHAPES = [(1, 8, 2), (5, 128, 8), (3, 40, 1), (2, 5, 5), (4, 384, 6)]


def by_kernel(scores, top_k, softmax, weights, dtype=torch.float32):
    return launch_top_experts(scores, top_k, softmax, weights, dtype)


def by_operator(scores, top_k, softmax, weights, dtype=torch.float32):
    return top_experts(scores, top_k, softmax=softmax, weights=weights, dtype=dtype)


WAYS = [by_operator, by_kernel]


def scores_of(rows, experts, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows * experts)
    return torch.randn(rows, experts, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("softmax", "weights"), KINDS)
def test_equal_to_float64(way, shape, softmax, weights):
    rows, experts, top_k = shape
    scores = scores_of(rows, experts)
    wide = scores.double().softmax(-1) if softmax else scores.double()
    chosen, ids = wide.topk(top_k)
    if weights == "sum":
        chosen = chosen / chosen.sum(-1, keepdim=True)
    elif weights == "softmax":
        chosen = chosen.softmax(-1)
    got, got_ids = way(scores, top_k, softmax, weights)
    assert got_ids.dtype == torch.int64
    assert torch.equal(got_ids, ids)
    torch.testing.assert_close(got.double(), chosen, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_of_equal_scores_the_first_ones_are_chosen(way):
    scores = torch.tensor([[1.0, 2, 2, 0, 2, 2], [0.0, -0.0, 0, -1, -1, -0.0]], device=DEVICE)
    values, ids = way(scores, 3, False, "scores")
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert values.tolist() == [[2, 2, 2], [0, 0, 0]]


@pytest.mark.parametrize("way", WAYS)
def test_infinite_scores_and_nan(way):
    scores = torch.tensor([[-INF, -3, INF, NAN, -INF], [-INF] * 5], device=DEVICE)
    values, ids = way(scores, 4, False, "scores")
    assert ids.tolist() == [[3, 2, 1, 0], [0, 1, 2, 3]]
    assert str(values.tolist()) == str([[NAN, INF, -3.0, -INF], [-INF] * 4])


@pytest.mark.parametrize("way", WAYS)
def test_half_of_any_strides(way):
    scores = scores_of(3, 64, HALF)[:, :48]
    values, ids = way(scores, 4, True, "sum", HALF)
    wanted, wanted_ids = way(scores.float().contiguous(), 4, True, "sum")
    assert values.dtype == HALF
    assert torch.equal(ids, wanted_ids)
    assert torch.equal(values, wanted.to(HALF))


@pytest.mark.parametrize("way", WAYS)
def test_a_row_does_not_depend_on_the_others(way):
    scores = scores_of(7, 96)
    values, ids = way(scores, 8, True, "sum")
    alone, alone_ids = way(scores[5:6].contiguous(), 8, True, "sum")
    assert torch.equal(bits(values[5:6]), bits(alone))
    assert torch.equal(ids[5:6], alone_ids)


def test_no_rows():
    values, ids = top_experts(scores_of(0, 8), 2, dtype=torch.bfloat16)
    assert (values.shape, values.dtype) == ((0, 2), torch.bfloat16)
    assert (ids.shape, ids.dtype) == ((0, 2), torch.int64)


def test_opcheck():
    for softmax, weights in KINDS:
        keywords = {"softmax": softmax, "weights": weights}
        opcheck(torch.ops.attn_ops.top_experts.default, (scores_of(3, 8), 2), keywords)


@pytest.mark.parametrize(
    ("scores", "keywords", "message"),
    [
        (torch.zeros(2, 3, 4), {}, "scores must be floating-point of shape"),
        (torch.zeros(2, 3).int(), {}, "scores must be floating-point of shape"),
        (torch.zeros(2, 3), {"top_k": 4}, "top_k must be from 1 to the experts 3, got 4"),
        (torch.zeros(2, 3), {"top_k": 0}, "top_k must be from 1 to the experts 3, got 0"),
        (torch.zeros(2, 3), {"weights": "mean"}, "weights must be known, got 'mean'"),
        (torch.zeros(2, 3), {"dtype": torch.int32}, "dtype must be floating-point"),
    ],
)
def test_refused(scores, keywords, message):
    with pytest.raises(ValueError, match=message):
        top_experts(scores, keywords.pop("top_k", 2), **keywords)
