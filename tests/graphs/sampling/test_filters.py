"""top-k, top-p and min-p: the tokens that stay, against brute force over Python lists."""

import pytest
import torch

from graphs.sampling import SamplingParams
from graphs.sampling.filters import filtered, reference_keep
from graphs.sampling.filters import kernel_keep as keep_on_device
from tests.graphs.sampling.exact import brute_force
from tests.kit.marks import long, slow
from tests.kit.sampling import stacked

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = torch.inf


def run(kernels, *tensors):
    """They run on a GPU, and interpreted on a machine without one; the result on the CPU."""
    return kernels(*(x.to(DEVICE) for x in tensors)).cpu()


def kernel_keep(*tensors):
    return run(keep_on_device, *tensors)


CASES = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 5},
    {"top_k": 64},
    {"top_k": 1000},
    {"top_p": 1e-38},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.93},
    {"top_p": 0.9999},
    {"min_p": 0.001},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.6},
    {"top_k": 20, "min_p": 0.05},
    {"top_p": 0.8, "min_p": 0.1},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    {},
]


@pytest.fixture(params=["sort", "kernels"])
def keep(request):
    if request.param == "sort":
        return reference_keep
    pytest.importorskip("triton")
    return kernel_keep


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("temperature", "rounds"),
    [(1.0, 1), *slow((0.4, 1)), *long((0.4, 6), (3.0, 6))],
)
def test_support_is_that_of_brute_force(keep, ties, temperature, rounds):
    params = [SamplingParams(temperature, seed=1, **case) for case in CASES for _ in range(rounds)]
    logits = torch.randn(len(params), 64) * 2
    if ties:
        logits = logits.round()
    logits[:, 50:55] = -INF
    fields = stacked(params)
    scaled = logits / fields["temperature"].unsqueeze(1)
    kept = keep(scaled, fields["top_k"], fields["top_p"], fields["min_p"]) & (logits > -INF)
    for row, wanted, values in zip(kept, params, logits, strict=True):
        assert row.tolist() == [p > 0 for p in brute_force(values, wanted)], wanted


def test_logits_that_stay_are_not_changed():
    params = [SamplingParams(0.7, top_k=4), SamplingParams(0.7), SamplingParams(0.0, top_k=4)]
    logits = torch.randn(3, 100).to(torch.bfloat16)
    out = filtered(logits, stacked(params))
    assert out.dtype == torch.float32
    assert (out[0] > -INF).sum() == 4
    assert torch.equal(out[0][out[0] > -INF], logits[0].float()[out[0] > -INF])
    assert torch.equal(out[1:], logits[1:].float())


@pytest.mark.parametrize("case", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {}])
def test_rows_of_infinities_and_nan(case):
    logits = torch.randn(4, 20)
    logits[0] = -INF
    logits[1] = torch.nan
    logits[2, 3] = torch.nan
    logits[3, 7] = INF
    out = filtered(logits, stacked([SamplingParams(1.0, **case)] * 4))
    assert not out.isnan().any()
    assert (out[:2] == -INF).all()
    assert out[2, 3] == -INF
    assert (out[2] > -INF).sum() >= 1
    assert out[3].argmax() == 7


def test_vocabulary_of_128256():
    params = SamplingParams(0.9, top_k=50000, top_p=0.95)
    logits = torch.randn(1, 128256) * 3
    kept = filtered(logits, stacked([params]))[0] > -INF
    weight = (logits[0].double() / 0.9).softmax(0)
    ranked = weight.sort(descending=True).values[:50000]
    wanted = (ranked.cumsum(0) - ranked < 0.95 * ranked.sum()).sum()
    assert abs(kept.sum() - wanted) <= 1
    assert weight[kept].min() > weight[~kept].max()


@pytest.mark.parametrize(
    "shape",
    [(1, 1), *slow(((3, 7),), ((5, 4096),), ((3, 9001),)), *long(((9, 2500),), ((9, 8999),))],
)
def test_kernels_keep_what_the_sort_keeps(shape):
    """Peaks, plateaus and tails of any width; rows by column, too, and one row alone."""
    pytest.importorskip("triton")
    for scale in (0.0, 1e-3, 3.0, 40.0):
        x = torch.randn(shape) * scale
        x[1::3] += torch.randn(shape)[1::3].exp().pow(2)
        x[:, ::5] = -INF
        x[:, 1::7] = x[:, 1::7].round()  # ties, and zeros of both signs
        x[0, -1], x[-1] = INF, -INF
        top_k = torch.randint(0, shape[1] + 1, shape[:1], dtype=torch.int32)
        top_p = (1 - torch.rand(shape[0]).pow(3)).clamp(min=1e-6, max=0.99999)
        top_p[::4], top_k[::3] = 1.0, 0
        fields = top_k, top_p, torch.rand(shape[0]) / 10
        wanted = reference_keep(x, *fields)
        assert torch.equal(kernel_keep(x, *fields), wanted)
        if scale == 3.0:
            assert torch.equal(kernel_keep(x.t().contiguous().t(), *fields), wanted)
            assert torch.equal(kernel_keep(x[:1], *(f[:1] for f in fields)), wanted[:1])
