"""The Triton kernels of latent attention on a GPU, at DeepSeek's sizes, and captured.

T rows, N heads, Lkv latent 512, R 64, P 128, V 128.
"""

import dataclasses

import pytest
import torch

from tests.attn_ops.backends.mla.triton.reference import TOLERANCE, assert_near, make_case
from tests.attn_ops.backends.mla.triton.test_prefill import check as check_prefill

pytestmark = pytest.mark.gpu

SIZES = {"latent": 512, "rope": 64, "value": 128, "block_size": 64}
DECODE = ([1, 1, 0, 1, 1], [1, 700, 9, 0, 2000])
DRAFTS = ([4, 4, 4], [5, 700, 130])


def close(case, out, lse=None, tolerance=None) -> None:
    wanted, wanted_lse = case.wanted()
    if out.shape[2] != wanted.shape[2]:
        wanted = torch.einsum("dnl,nvl->dnv", wanted, case.w_uv.double().cpu())
    tolerance = tolerance or 2 * TOLERANCE[out.dtype]
    assert_near(out, wanted, tolerance)
    if lse is not None:
        torch.testing.assert_close(lse.double().cpu(), wanted_lse, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_splits", [1, 5, 40, None])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("batch", [DECODE, DRAFTS], ids=["decode", "drafts"])
@pytest.mark.parametrize("heads", [5, 16, 128])
def test_decode(heads, batch, kv_cache_dtype, num_splits):
    from attn_ops.backends.mla.triton.decode import mla_decode
    from attn_ops.backends.mla.triton.project import mla_decode_project

    case = make_case(*batch, heads, dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype, **SIZES)
    lse = torch.full(case.q_pe.shape[:2], float("nan"), device="cuda")
    more = case.options | {"num_splits": num_splits, "lse": lse}
    close(case, mla_decode(*case.inputs, **more), lse)
    lse.fill_(float("nan"))
    close(case, mla_decode_project(*case.inputs, case.w_uv, **more), lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(dtype):
    from attn_ops.backends.mla.triton.project import mla_decode_project

    case = make_case(*DECODE, 16, dtype=dtype, **SIZES)
    close(case, mla_decode_project(*case.inputs, case.w_uv, **case.options, num_splits=3))


@pytest.mark.parametrize(("keys", "warps"), [(64, 4), (64, 8)])
def test_transposed_products(keys, warps):
    from attn_ops.backends.mla.triton.decode import mla_decode
    from attn_ops.backends.mla.triton.launch import DecodeLaunch

    case = make_case(*DECODE, 16, dtype=torch.bfloat16, **SIZES)
    launch = DecodeLaunch(16, keys, warps, 2, swap=True)
    close(case, mla_decode(*case.inputs, **case.options, launch=launch))


@pytest.mark.parametrize("heads", [16, 128])
def test_captured_and_launched_early(heads):
    """A chain of kernels that start before the one before has ended, replayed with new values."""
    from attn_ops.backends.mla.triton.absorb import absorb
    from attn_ops.backends.mla.triton.project import mla_decode_project

    case = make_case(*DECODE, heads, dtype=torch.bfloat16, num_padding_rows=0, **SIZES)
    rows = case.q_pe.shape[0]
    q_nope = torch.randn(rows, heads, 128, dtype=torch.bfloat16, device="cuda")
    w_uk = torch.randn(heads, 128, 512, dtype=torch.bfloat16, device="cuda") / 12
    seq_lens = case.seq_lens.clone()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        scaled = q_nope * 1.0  # written by the kernel right before
        ql_nope = absorb(scaled, w_uk)
        out = mla_decode_project(
            ql_nope, *case.inputs[1:4], seq_lens, case.inputs[5], case.w_uv, **case.options,
        )  # fmt: skip
        return ql_nope, out

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ql_nope, out = run()
    for seed in range(20):
        torch.manual_seed(seed)
        q_nope.normal_()
        lens = [min(n, 1 + seed * 97) for n in case.seq_lens.tolist()]
        seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        wanted = torch.einsum("dnp,npl->dnl", q_nope.float(), w_uk.float())
        assert_near(ql_nope, wanted.double().cpu(), 1.5e-2)
        tokens = [kv[:n] for kv, n in zip(case.tokens, lens, strict=True)]
        close(dataclasses.replace(case, ql_nope=ql_nope, tokens=tokens), out)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [([5, 0, 300], [5, 0, 300]), ([40, 200], [900, 333])], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prefill(lengths, causal, dtype):
    check_prefill(lengths, causal, dtype, sizes=(192, 128), heads=3)


def test_gather():
    from attn_ops.backends.mla.gather import reference_gather_latents
    from attn_ops.backends.mla.triton.gather import gather_latents

    case = make_case([1, 1, 1], [700, 9, 333], dtype=torch.bfloat16, **SIZES)
    starts = torch.tensor([100, 3, 0], dtype=torch.int32, device="cuda")
    cu = torch.tensor([0, 600, 606, 939], dtype=torch.int32, device="cuda")
    out, wanted = (torch.zeros(950, 576, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    gather_latents(case.kv_cache, case.block_table, cu, starts, out)
    reference_gather_latents(case.kv_cache, case.block_table, cu, starts, wanted)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
