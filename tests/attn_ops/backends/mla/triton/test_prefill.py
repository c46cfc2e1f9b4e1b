"""Attention over up-projected keys against float64; without a GPU it runs interpreted."""

import pytest
import torch

from attn_ops.backends.triton import BACKEND
from tests.attn_ops.backends.mla.triton.reference import DEVICE, TOLERANCE, assert_near
from tests.kit.marks import slow

pytestmark = [
    pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET"),
    pytest.mark.usefixtures("uninitialized_memory_is_nan"),
]

EQUAL = ([5, 0, 1, 37], [5, 0, 1, 37])
CONTEXT = ([5, 2, 0, 17], [80, 2, 9, 40])
FEWER_KEYS = ([5, 3, 4], [70, 0, 2])


def attention(q, k, v, scale, causal):
    """[Q, N, V] and log-sum-exp [Q, N] of one request, float64."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    scores = torch.einsum("qnh,cnh->qnc", q, k) * scale
    if causal:
        seen = torch.arange(len(q)) + len(k) - len(q)
        scores.masked_fill_(torch.arange(len(k)) > seen[:, None, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("qnc,cnv->qnv", weights, v), scores.logsumexp(-1)


def check(lengths, causal, dtype=torch.float16, sizes=(24, 16), heads=2, tolerance=None, **more):
    from attn_ops.backends.mla.triton.prefill import mla_prefill

    (columns, value), (query_lens, key_lens) = sizes, lengths
    generator = torch.Generator().manual_seed(0)
    num_keys, num_rows = sum(key_lens) + 3, sum(query_lens) + 2
    k, v = (
        torch.randn(heads, num_keys, n, generator=generator).to(dtype).transpose(0, 1)
        for n in (columns, value)
    )
    q = torch.randn(num_rows, heads, columns + 8, generator=generator).to(dtype)[:, :, :columns]
    for x, valid in ((k, sum(key_lens)), (v, sum(key_lens)), (q, sum(query_lens))):
        x[valid:] = float("nan")
    starts = [torch.tensor([0, *n]).cumsum(0).int() for n in (query_lens, key_lens)]
    wanted = torch.zeros(num_rows, heads, value, dtype=torch.float64)
    wanted_lse = torch.full((num_rows, heads), float("-inf"), dtype=torch.float64)
    for i, (query_len, key_len) in enumerate(zip(query_lens, key_lens, strict=True)):
        rows = slice(starts[0][i], starts[0][i + 1])
        keys = slice(starts[1][i], starts[1][i + 1])
        if query_len and key_len:
            wanted[rows], wanted_lse[rows] = attention(q[rows], k[keys], v[keys], 0.2, causal)
    out, lse = mla_prefill(
        *(x.to(DEVICE) for x in (q, k, v, *starts)), max(query_lens), max(key_lens),
        scale=0.2, causal=causal, with_lse=True, **more,
    )  # fmt: skip
    tolerance = tolerance or TOLERANCE[dtype]
    assert out.is_contiguous()
    assert_near(out, wanted, tolerance)
    torch.testing.assert_close(lse.double().cpu(), wanted_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [EQUAL, CONTEXT, FEWER_KEYS], ids=str)
def test_lengths(lengths, causal):
    from attn_ops.backends.mla.triton.prefill import PrefillLaunch

    check(lengths, causal, launch=PrefillLaunch(16, 16, 4, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "sizes", [(40, 8), (40, 16), (35, 7), (24, 8), (56, 24), (192, 128)], ids=str
)
def test_strides_that_are_not_loaded_ahead(sizes, causal):
    """Of which ptxas 12.8 made wrong code: see `prefill_launch`."""
    for dtype in (torch.float16, torch.bfloat16):
        check(([79, 325], [79, 325]), causal, dtype=dtype, sizes=sizes)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dtypes(dtype):
    check(CONTEXT, True, dtype)


@pytest.mark.parametrize("sizes", [(12, 8), (32, 32), (48, 24), *slow(((192, 128),), ((96, 64),))])
def test_sizes(sizes):
    check(CONTEXT, True, sizes=sizes)


def test_no_rows():
    check(([0, 0], [3, 0]), True)


def test_without_lse():
    from attn_ops.backends.mla.triton.prefill import mla_prefill

    x = torch.randn(4, 2, 16, dtype=torch.float16, device=DEVICE)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    out, lse = mla_prefill(x, x, x, starts, starts, 4, 4, scale=0.2, causal=True, with_lse=False)
    assert lse is None
    assert_near(out, attention(x, x, x, 0.2, True)[0], 2e-3)
