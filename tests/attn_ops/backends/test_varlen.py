"""VARLEN over a `varlen_attn` that records its arguments and checks them against torch's own."""

import dataclasses
import inspect
import itertools
from typing import Any

import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention, varlen_attention
from attn_ops.backends import registry
from attn_ops.backends import varlen as backend_module
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.metadata import AttentionMetadata

BACKEND = dataclasses.replace(
    backend_module.BACKEND,
    support=dataclasses.replace(backend_module.BACKEND.support, devices=("cpu",)),
)
QUERY, SEQ = [1, 5, 0, 7], [17, 5, 0, 30]


@pytest.fixture
def calls(monkeypatch):
    """Every call's arguments by name; the result is that of plain PyTorch."""
    recorded = []
    module = pytest.importorskip("torch.nn.attention.varlen")
    signature = inspect.signature(module.varlen_attn)
    if "block_table" not in signature.parameters:
        pytest.skip("this torch has no block tables")

    def fake(*arguments, **keywords):
        bound = signature.bind(*arguments, **keywords).arguments
        recorded.append(bound)
        return by_torch(**{name: bound.get(name) for name in signature.parameters})

    monkeypatch.setattr(backend_module, "varlen_function", lambda: fake)
    return recorded


def by_torch(
    query, key, value, cu_seq_q, cu_seq_k, scale, window_size, seqused_k, block_table, **others
):
    """Row by row; rows that no request owns are NaN, as memory may be."""
    out = torch.full_like(query, float("nan"))
    starts, group = cu_seq_q.tolist(), query.shape[1] // key.shape[-2]
    for r, (first, end) in enumerate(itertools.pairwise(starts)):
        if block_table is None:
            k, v = (x[cu_seq_k[r] : cu_seq_k[r + 1]] for x in (key, value))
        else:
            position, size = torch.arange(int(seqused_k[r])), key.shape[1]
            block = block_table[r][position // size].long()
            k, v = (x[block, position % size] for x in (key, value))
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
        for row in range(first, end):
            own, keys = k.shape[0] - (end - row), torch.arange(k.shape[0])
            scores = torch.einsum("nh,cnh->nc", query[row].double(), k) * scale
            left, right = window_size
            hidden = (keys < own - left) & (left >= 0) | (keys > own + right) & (right >= 0)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[row] = torch.einsum("nc,cnh->nh", weights, v)
    return out


def make(padding=2, causal=True, **spec):
    table = torch.arange(1, 9, dtype=torch.int32).view(4, 2)
    cache = torch.full((9, 2, 16, 2, 64), float("nan"))
    for blocks, length in zip(table, SEQ, strict=True):
        for i in range(length):
            cache[blocks[i // 16], :, i % 16] = torch.randn(2, 2, 64)
    common = CommonAttentionMetadata.from_lengths(
        QUERY, SEQ, table, 16, num_padded_tokens=sum(QUERY) + padding
    )
    common.causal = causal
    q = torch.randn(sum(QUERY) + padding, 4, 64).half()
    q[sum(QUERY) :] = float("nan")
    made = AttentionSpec(4, 2, 64, torch.float16, causal=causal, **spec)
    return q, cache.half(), BACKEND.builder(BACKEND, [made], 16, "cpu").build(0, common)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("padding", [0, 2])
def test_over_a_cache(calls, causal, window, padding):
    q, cache, meta = make(padding, causal, sliding_window=window)
    out = attention(q, cache, meta, 0.125, sliding_window=window)
    want = reference_attention(q, cache, meta.common, 0.125, sliding_window=window)
    assert (out.double() - want).norm() <= 2e-3 * want.norm()
    assert (out[13:] == 0).all()
    assert out.is_contiguous()
    (call,) = calls
    assert call["cu_seq_k"] is None, "FA3 takes it or a block table, not both"
    assert call["seqused_k"] is meta.common.seq_lens
    assert call["block_table"] is meta.common.block_table_tensor
    assert (call["max_q"], call["max_k"]) == (7, 30)
    assert call["key"].shape == call["value"].shape == (9, 16, 2, 64)
    assert call["key"].data_ptr() == cache.data_ptr()
    assert call["enable_gqa"]
    left = -1 if window is None else 8
    assert call["window_size"] == (left, 0 if causal else left)
    assert call["scale"] == 0.125


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_without_a_cache(calls, causal, window):
    q, _, meta = make(causal=causal)
    common = meta.common.replace(seq_lens=meta.common.query_lens, seq_lens_cpu=None)
    k, v = torch.randn(2, 15, 2, 64).half()
    k[13:], v[13:] = float("nan"), float("nan")
    meta = AttentionMetadata(common, BACKEND)
    out = varlen_attention(q, k, v, meta, 0.125, sliding_window=window)
    torch_backend = registry.get_backend("TORCH")
    reference = AttentionMetadata(common, torch_backend)
    wide = (q.double(), k.double(), v.double())
    want = varlen_attention(*wide, reference, 0.125, sliding_window=window)
    assert (out.double() - want).norm() <= 2e-3 * want.norm()
    assert (out[13:] == 0).all()
    (call,) = calls
    assert call["key"].shape[0] == call["value"].shape[0] == 13
    assert call["cu_seq_k"] is common.query_start_loc
    assert "block_table" not in call
    assert call["max_k"] == 7


def test_no_rows(calls):
    q, cache, meta = make()
    meta.common.num_actual_tokens = 0
    assert (attention(q, cache, meta, 0.125) == 0).all()
    assert not calls


def unavailable(
    monkeypatch,
    torch_version: Any = "2.12.0",
    capability: Any = (9, 0),
    active: Any = "FA3",
    cuda: Any = True,
):
    monkeypatch.setattr(torch, "__version__", torch_version)
    parts = tuple(map(int, torch_version.split(".")[:2]))
    monkeypatch.setattr(backend_module, "TORCH_VERSION", parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(backend_module, "active_implementation", lambda: active)
    return backend_module.unavailable()


def test_unavailable(monkeypatch):
    assert unavailable(monkeypatch) is None
    for reason, machine in (
        ("torch must be 2.12 or later, got 2.11.0", {"torch_version": "2.11.0"}),
        ("a CUDA device must be present, got none", {"cuda": False}),
        ("the GPU must be sm_90, got a GPU", {"capability": (8, 0)}),
        ("must be FA3 for paged caches, got the built-in FA2", {"active": None}),
        ("must be FA3 for paged caches, got FA4", {"active": "FA4"}),
    ):
        assert reason in str(unavailable(monkeypatch, **machine))


def test_the_active_implementation_is_torchs(calls):
    assert backend_module.active_implementation() is None


def test_refusals(monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", {"VARLEN": "attn_ops.backends.varlen"})
    assert registry.get_backend("VARLEN") is backend_module.BACKEND
    spec = AttentionSpec(
        2, 1, 80, torch.float32, soft_cap=1.0, alibi=True, sinks=True, kv_cache_dtype="fp8_e4m3"
    )
    with pytest.raises(ValueError, match="backend VARLEN cannot be used") as raised:
        registry.select_backend(spec, block_size=128, device="cpu", backend="VARLEN")
    asked = ("device", "dtype", "head_size", "block_size", "soft_cap", "kv_cache_dtype")
    for name in (*asked, "alibi_slopes", "sinks"):
        assert f"{name} must be" in str(raised.value)
