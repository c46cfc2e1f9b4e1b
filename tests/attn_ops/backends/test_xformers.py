"""XFORMERS without a GPU: over a stand-in for xFormers, and over its own kernel, interpreted.

The second needs xFormers to be importable: it is skipped elsewhere.
"""

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch

from attn_ops import AttentionSpec, attention, attention_with_lse
from attn_ops.backends import registry, xformers_backend
from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.backends.triton import BACKEND as TRITON
from attn_ops.backends.xformers_backend import BACKEND as XFORMERS
from attn_ops.backends.xformers_backend import forward as xformers_forward
from attn_ops.backends.xformers_backend import leading_queries, page_views
from attn_ops.metadata import AttentionCGSupport, AttentionMetadata
from tests.attn_ops.backends.paged import heads_first, make_paged
from tests.kit.batches import random_batch

BACKEND = dataclasses.replace(
    xformers_backend.BACKEND,
    support=dataclasses.replace(xformers_backend.BACKEND.support, devices=("cpu",)),
)
PLAIN = AttentionSpec(4, 2, 64, torch.float16)


class FakeXFormers:
    """What the backend uses of xFormers: attention over pages, request by request."""

    def __init__(self):
        self.calls = []
        self.FwOp = type("FwOp", (), {"BLOCK_N": 64, "apply": classmethod(self._apply)})
        self.Inputs = self._inputs
        for name in (
            "_SeqLenInfo",
            "_PaddedSeqLenInfo",
            "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
        ):
            setattr(self, name, types.SimpleNamespace)

    @staticmethod
    def _inputs(query, key, value, attn_bias, scale):
        return types.SimpleNamespace(**locals())

    def _apply(self, op, inputs, needs_gradient):
        out, lse = self._attention(op=op, **vars(inputs))
        return out, types.SimpleNamespace(lse=lse) if needs_gradient else None

    def _attention(self, query, key, value, attn_bias, scale, op):
        self.calls.append((attn_bias, op))
        size, starts = attn_bias.page_size, attn_bias.q_seqinfo.seqstart_py
        assert starts[-1] == query.shape[1]
        assert key.shape[1] % size == 0
        assert size % op.BLOCK_N == 0
        out, lse = torch.zeros_like(query), torch.full(query.shape[:-1], -torch.inf)
        for d, length in enumerate(attn_bias.k_seqinfo.seqlen.tolist()):
            position = torch.arange(length)
            row = attn_bias.block_tables[d][position // size] * size + position % size
            rows = slice(starts[d], starts[d + 1])
            k, v, q = key[0, row].double(), value[0, row].double(), query[0, rows].double()
            scores = torch.einsum("lkgh,ckgh->lkgc", q, k) * scale
            last = length - (starts[d + 1] - starts[d]) + torch.arange(q.shape[0])
            hidden = position > last[:, None]
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
            lse[0, rows] = scores.logsumexp(-1).float()
            weights = scores.softmax(-1).nan_to_num(0.0)
            out[0, rows] = torch.einsum("lkgc,ckgh->lkgh", weights, v).to(query.dtype)
        return out, lse.permute(0, 2, 3, 1)


@pytest.fixture(params=["stand-in", "interpreted"])
def library(request, monkeypatch):
    """xFormers as the backend imports it; of the real one, calls are recorded."""
    xformers_backend.operator.cache_clear()
    if request.param == "stand-in":
        fake = FakeXFormers()
        for name in ("xformers", "xformers.ops", "xformers.ops.fmha"):
            monkeypatch.setitem(sys.modules, name, fake)
        for name in ("triton_splitk", "attn_bias"):
            monkeypatch.setitem(sys.modules, f"xformers.ops.fmha.{name}", fake)
        yield fake
        xformers_backend.operator.cache_clear()
        return
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    monkeypatch.setenv("XFORMERS_ENABLE_TRITON", "1")
    splitk = pytest.importorskip("xformers.ops.fmha.triton_splitk")
    monkeypatch.setattr(splitk.FwOp, "SUPPORTED_DEVICES", {"cpu"})
    monkeypatch.setattr(splitk, "_is_cuda", lambda: False)
    recorded, apply = types.SimpleNamespace(calls=[]), splitk.FwOp.apply.__func__

    def record(cls, inputs, needs_gradient):
        recorded.calls.append((inputs.attn_bias, cls))
        return apply(cls, inputs, needs_gradient)

    monkeypatch.setattr(splitk.FwOp, "apply", classmethod(record))
    yield recorded
    xformers_backend.operator.cache_clear()


def make(
    query, seq, heads=(4, 2), head_size=64, block_size=16, layout="NHD", causal=True, pad=2, **spec
):
    made = AttentionSpec(*heads, head_size, torch.float16, causal=causal, **spec)
    q, cache, common = make_paged(query, seq, made, block_size, num_padding_rows=pad)
    cache = heads_first(cache) if layout == "HND" else cache
    meta = BACKEND.builder(BACKEND, [made], block_size, "cpu").build(0, common)
    return q, cache, meta, spec


def check(q, cache, meta, options):
    scale = q.shape[2] ** -0.5
    out, lse = attention_with_lse(q, cache, meta, scale, **options)
    want_lse = torch.empty(q.shape[:2])
    want = reference_attention(q, cache, meta.common, scale, lse=want_lse, **options)
    assert (out.double() - want).norm() <= 2e-3 * want.norm()
    assert (out[meta.common.num_actual_tokens :] == 0).all()
    assert torch.equal(lse.isinf(), want_lse.isinf())
    assert torch.allclose(lse, want_lse, rtol=0, atol=5e-3)
    assert torch.equal(attention(q, cache, meta, scale, **options), out)


BATCHES = {
    "decode": ([1, 1, 1, 1], [1, 2, 17, 70], (4, 1)),
    "padded": ([1, 1, 1], [5, 20, 0], (3, 1)),
    "mixed": ([1, 1, 0, 7, 20], [5, 33, 0, 7, 41], (2, 1)),
    "prefill": ([2, 18, 35], [2, 18, 35], (0, 0)),
    "uniform": ([4, 4, 4], [4, 50, 35], (3, 4)),
    "none in front": ([3, 1, 1], [3, 9, 20], (0, 0)),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_against_oracle(library, batch, layout):
    query, seq, (count, length) = BATCHES[batch]
    case = make(query, seq, layout=layout)
    check(*case)
    assert bool(library.calls) == (count > 0)
    for bias, _ in library.calls:
        assert bias.q_seqinfo.seqstart_py == list(range(0, count * length + 1, max(length, 1)))


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (4, 1)])
@pytest.mark.parametrize(("block_size", "tile"), [(16, 16), (48, 16), (128, 64)])
def test_groups_and_block_sizes(library, heads, block_size, tile):
    for batch in ("decode", "uniform"):
        check(*make(*BATCHES[batch][:2], heads=heads, block_size=block_size))
    assert {op.BLOCK_N for _, op in library.calls} == {tile}


def test_non_causal(library):
    check(*make([1, 1, 1], [1, 40, 17], causal=False))
    assert len(library.calls) == 2
    check(*make([4, 4], [9, 40], causal=False))
    assert len(library.calls) == 2, "rows of one request that see the same keys are Triton's"


@pytest.mark.parametrize(
    "spec",
    [
        {"sliding_window": 9},
        {"soft_cap": 5.0},
        {"head_size": 72},
        {"head_size": 40},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
    ],
)
def test_layers_that_xformers_has_no_kernel_for(library, spec):
    for batch in ("decode", "mixed"):
        check(*make(*BATCHES[batch][:2], **spec))
    assert not library.calls


def test_one_bias_a_step(library):
    q, cache, meta, _ = make(*BATCHES["decode"][:2])
    for _ in range(3):
        attention(q, cache, meta, 0.125)
    assert len(library.calls) == 3
    assert len({id(bias) for bias, _ in library.calls}) == 1
    (bias, _), *_ = library.calls
    assert bias.k_seqinfo.seqlen.data_ptr() == meta.common.seq_lens.data_ptr(), "read anew"


def test_no_tokens(library):
    for query, seq in (([], []), ([0, 0], [5, 0])):
        q, cache, meta, _ = make(query, seq)
        assert (attention(q, cache, meta, 0.125) == 0).all()
    assert not library.calls


def lengths_only(query, known=True, num_actual_tokens=None, max_query_len=None, causal=True) -> Any:
    starts = torch.tensor([0, *query]).cumsum(0).int()
    return types.SimpleNamespace(
        num_reqs=len(query),
        query_start_loc_cpu=starts if known else None,
        num_actual_tokens=sum(query) if num_actual_tokens is None else num_actual_tokens,
        max_query_len=max(query) if max_query_len is None else max_query_len,
        causal=causal,
    )


def test_leading_queries():
    for want, batch in (
        ((2, 1), lengths_only([1, 1, 5, 1])),
        ((1, 1), lengths_only([1, 0, 1])),
        ((4, 1), lengths_only([1, 1, 0, 0], num_actual_tokens=4)),
        ((2, 1), lengths_only([1, 1, 0, 0])),
        ((3, 16), lengths_only([16, 16, 16])),
        ((0, 1), lengths_only([17, 17])),
        ((0, 1), lengths_only([4, 4, 3])),
        ((0, 1), lengths_only([4, 4], causal=False)),
        ((3, 1), lengths_only([1, 1, 1], known=False)),
        ((0, 0), lengths_only([2, 1], known=False)),
        ((0, 0), lengths_only([1, 1], known=False, max_query_len=2)),
        ((0, 0), lengths_only([1, 1, 0], known=False)),
    ):
        assert leading_queries(batch) == want


def test_a_captured_decode_reads_no_lengths_of_the_host(library):
    """As inside a capture: no mirrors; lengths and tables change between replays."""
    q, cache, meta, options = make([1, 1, 1], [3, 40, 17], pad=0)
    common = dataclasses.replace(
        meta.common, query_start_loc_cpu=None, seq_lens_cpu=None, num_computed_tokens_cpu=None
    )
    meta = BACKEND.builder(BACKEND, [PLAIN], 16, "cpu").build_for_cudagraph_capture(common)
    for lengths in ([3, 40, 17], [2, 39, 0], [0, 0, 0]):
        common.seq_lens.copy_(torch.tensor(lengths))
        check(q, cache, meta, options)
    assert len(library.calls) == 6


def test_table_widths_are_powers_of_two(library):
    q, cache, meta, options = make([1], [70])
    table = torch.zeros(1, 64, dtype=torch.int32)
    table[:, :6] = meta.common.block_table_tensor
    common = dataclasses.replace(meta.common, block_table_tensor=table)
    meta = BACKEND.builder(BACKEND, [PLAIN], 16, "cpu").build(0, common)
    check(q, cache, meta, options)
    assert library.calls[0][0].block_tables.shape == (1, 8)


def test_page_views_of_a_part_of_a_cache():
    cache = torch.randn(6, 2, 16, 4, 32)[2:, :, :, 1:3]
    k, v, pages = page_views(cache, 3)
    assert pages == 2
    assert k.shape == (1, 7 * 16, 2, 3, 32)
    for block in range(4):
        rows = slice(block * pages * 16, block * pages * 16 + 16)
        assert torch.equal(k[0, rows, :, 2], cache[block, 0])
        assert torch.equal(v[0, rows, :, 0], cache[block, 1])
    apart = torch.randn(4, 33, 16, 32)[:, :32].view(4, 2, 16, 16, 32)[:, :, :, :3]
    with pytest.raises(ValueError, match=r"kv_cache must have contiguous heads.*supported: NHD"):
        page_views(apart, 1)


def test_refusals(monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", {"XFORMERS": "attn_ops.backends.xformers_backend"})
    backend = registry.get_backend("XFORMERS")
    assert backend.support.cudagraph is backend.builder.cudagraph_support
    assert backend.support.cudagraph is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    spec = AttentionSpec(2, 1, 33, torch.float32, alibi=True, sinks=True)
    with pytest.raises(ValueError, match="backend XFORMERS cannot be used") as raised:
        registry.select_backend(spec, block_size=24, device="cpu", backend="XFORMERS")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"; backends that can: .*FLEX"):
        registry.select_backend(spec, block_size=24, device="cpu", backend="XFORMERS")
    for name in ("device", "dtype", "head_size", "block_size", "alibi_slopes", "sinks"):
        assert f"{name} must be" in str(raised.value)


@pytest.mark.parametrize(
    ("installed", "found", "reason"),
    [
        (None, None, "xformers must be installed, got none"),
        ("0.0.35", None, "xformers must be installed, got none"),
        ("0.0.34", "spec", "xformers must be 0.0.35 or later, got 0.0.34"),
        ("0.0.35+cu128", "spec", None),
        ("0.1.0", "spec", None),
    ],
)
def test_unavailable(reason_against, installed, found, reason):
    assert reason_against(xformers_backend, installed, found) == reason


INTERPRETED = pytest.mark.skipif(TRITON.unavailable() is not None, reason="needs TRITON_INTERPRET")


@INTERPRETED
@pytest.mark.parametrize("which", ["q", "kv_cache"])
def test_xformers_refuses_heads_that_are_not_contiguous(which):
    """TRITON does; its kernels, called here without its checks, read other elements."""
    q, cache, common = random_batch((3, 5), (40, 20), torch.float16)
    if which == "q":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        cache = cache.transpose(3, 4).contiguous().transpose(3, 4)
    meta = AttentionMetadata(common, XFORMERS, {}, 16)
    with pytest.raises(ValueError, match=f"{which}"):
        xformers_forward(q, cache, meta, AttentionOptions(0.2))
