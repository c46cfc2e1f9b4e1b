"""FLASH_ATTN without a GPU: what the library is called with, and what becomes of its results."""

import dataclasses
import re
import sys
import types
from typing import Any

import pytest
import torch

from attn_ops import AttentionMetadata, AttentionSpec
from attn_ops.backends import flash_attn
from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.flash_attn import BACKEND, library
from attn_ops.backends.flash_attn.triton.quantize import quantize_query, quantize_tokens
from attn_ops.backends.torch_backend import reference_attention
from tests.attn_ops.backends.paged import make_paged
from tests.kit.queries import reference_quantize_query, reference_quantize_tokens

ASKED = (library.find_library, library.fa_version, library.unavailable, library.varlen_function)


class FakeLibrary(types.SimpleNamespace):
    """vLLM's build as seen from outside: FA3, computing by the float64 oracle."""

    def __init__(self, common, options, versions=(3,)):
        super().__init__(common=common, options=options, versions=versions, calls=[], planned=[])

    def is_fa_version_supported(self, version):
        return version in self.versions

    def get_scheduler_metadata(self, **arguments):
        self.planned.append(arguments)
        return torch.zeros(4, dtype=torch.int32)

    def flash_attn_varlen_func(self, **arguments):
        self.calls.append(arguments)
        q, out = arguments["q"].double(), arguments["out"]
        if out is None:
            out = torch.zeros_like(arguments["q"])
        cache = torch.stack([arguments["k"], arguments["v"]], 1)
        for name, i in (("k_descale", 0), ("v_descale", 1)):
            if arguments.get(name) is not None:
                cache = cache.double()
                cache[:, i] *= arguments[name][0, 0].double()
        if arguments.get("q_descale") is not None:
            scale_SK = arguments["q_descale"].double()
            scale_SN = scale_SK.repeat_interleave(q.shape[1] // scale_SK.shape[1], 1)
            scale_TN = scale_SN.repeat_interleave(self.common.query_start_loc.diff(), 0)
            q[: len(scale_TN)] *= scale_TN[:, :, None]
        lse = torch.empty(q.shape[:2])
        options = {"sliding_window": self.options.sliding_window, "lse": lse}
        rows = self.common.num_actual_tokens
        want = reference_attention(q, cache, self.common, self.options.scale, **options)
        out[:rows] = want[:rows].to(out.dtype)
        return (out, lse.t()) if arguments["return_softmax_lse"] else out


@pytest.fixture(autouse=True)
def forgotten():
    for function in ASKED:
        function.cache_clear()
    yield
    for function in ASKED:
        function.cache_clear()


def batch(dtype=torch.bfloat16, fp8=False, padding=2, query=(1, 5, 0, 7)):
    """q [T, 4, 64], a cache [P, 2, 16, 2, 64] and the batch."""
    spec = AttentionSpec(4, 2, 64, dtype, kv_cache_dtype="fp8_e4m3" if fp8 else "auto")
    return make_paged(query, [17, 5, 0, 30], spec, num_padding_rows=padding)


def install(monkeypatch, fake, name="vllm_flash_attn"):
    for function in ASKED[1:]:
        function.cache_clear()
    monkeypatch.setattr(library, "find_library", lambda: (name, fake))
    return fake


def metadata(common, spec):
    support = dataclasses.replace(BACKEND.support, devices=("cpu",))
    backend = dataclasses.replace(BACKEND, support=support)
    return backend.builder(backend, [spec], 16, "cpu").build(0, common)


def error(out, want):
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forward(monkeypatch, window, dtype):
    q, cache, common = batch(dtype)
    lse = torch.empty(q.shape[:2])
    options = AttentionOptions(0.125, sliding_window=window, lse=lse)
    fake = install(monkeypatch, FakeLibrary(common, options))
    meta = metadata(common, AttentionSpec(4, 2, 64, dtype, sliding_window=window))
    out = flash_attn.forward(q, cache, meta, options)
    want_lse = torch.empty(q.shape[:2])
    want = reference_attention(q, cache, common, 0.125, sliding_window=window, lse=want_lse)
    assert error(out, want) < 5e-3
    assert (out[13:] == 0).all()
    assert torch.equal(lse.isinf(), want_lse.isinf())
    assert (lse - want_lse)[~want_lse.isinf()].abs().max() < 1e-5
    (call,) = fake.calls
    assert call["window_size"] == ((-1, -1) if window is None else (8, 0))
    assert call["scheduler_metadata"] is meta.plans[next(iter(meta.plans))]
    assert (call["softcap"], call["fa_version"], call["s_aux"]) == (0.0, 3, None)
    assert "q_descale" not in call


@pytest.mark.parametrize(("versions", "makes"), [((3,), True), ((2,), False)])
def test_without_padding_rows_fa3_makes_the_output(monkeypatch, versions, makes):
    """FA2 would give it q's strides."""
    q, cache, common = batch(padding=0)
    lse = torch.empty(q.shape[:2])
    want = reference_attention(q, cache, common, 0.125)
    for options in (AttentionOptions(0.125), AttentionOptions(0.125, lse=lse)):
        fake = install(monkeypatch, FakeLibrary(common, options, versions))
        meta = metadata(common, AttentionSpec(4, 2, 64, torch.bfloat16))
        for _ in range(2):
            assert error(flash_attn.forward(q, cache, meta, options), want) < 5e-3
        assert [call["out"] is None for call in fake.calls] == [makes] * 2


def test_what_layers_share_follows_their_geometry(monkeypatch):
    """Keywords are found again by layers of the same window and cap, whatever their scale."""
    q, cache, common = batch()
    layers = [(0.125, None, None), (0.5, 9, None), (0.25, None, 5.0), (1.0, None, None)]
    fake = install(monkeypatch, FakeLibrary(common, AttentionOptions(0.125)))
    meta = metadata(common, AttentionSpec(4, 2, 64, torch.bfloat16))
    for layer in layers * 2:
        flash_attn.forward(q, cache, meta, AttentionOptions(layer[0], *layer[1:]))
    names = ("softmax_scale", "window_size", "softcap")
    called = [tuple(call[name] for name in names) for call in fake.calls]
    whole = (-1, -1)
    want = [(0.125, whole, 0.0), (0.5, (8, 0), 0.0), (0.25, whole, 5.0), (1.0, whole, 0.0)]
    assert called == want * 2
    planned = [call["scheduler_metadata"] is not None for call in fake.calls]
    assert planned == [True, False, False, True] * 2


def test_the_plan_is_found_whatever_causality_the_spec_says(monkeypatch):
    q, cache, common = batch()
    common.causal = False
    options = AttentionOptions(0.125)
    fake = install(monkeypatch, FakeLibrary(common, options))
    meta = metadata(common, AttentionSpec(4, 2, 64, torch.bfloat16))
    for _ in range(2):
        flash_attn.forward(q, cache, meta, options)
    (planned,) = fake.planned
    assert planned["causal"] is False
    assert [c["scheduler_metadata"] is None for c in fake.calls] == [False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_cache(monkeypatch, dtype, scaled):
    q, cache, common = batch(dtype, fp8=True)
    scales: dict[str, Any] = {}
    if scaled:
        scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([1.7])}
    options = AttentionOptions(0.125, kv_cache_dtype="fp8_e4m3", **scales)
    fake = install(monkeypatch, FakeLibrary(common, options))
    spec = AttentionSpec(4, 2, 64, dtype, kv_cache_dtype="fp8_e4m3")
    meta = metadata(common, spec)
    assert fake.planned[0]["qkv_dtype"] == torch.float8_e4m3fn
    out = flash_attn.forward(q, cache, meta, options)
    assert out.dtype == dtype
    assert (out[13:] == 0).all()
    (call,) = fake.calls
    assert call["out"].dtype == torch.bfloat16, "all that FA3 writes for FP8"
    assert {call[n].dtype for n in "qkv"} == {torch.float8_e4m3fn}
    assert call["q_descale"].shape == (4, 2)
    assert (call["k_descale"] is not None) == scaled
    keywords = {"kv_cache_dtype": "fp8_e4m3", **scales}
    want = reference_attention(q, cache, common, 0.125, **keywords)
    assert error(out, want) < 4e-2, "q is rounded to 3 bits behind the point"
    rounded, scale = reference_quantize_query(q, 13)
    want = reference_attention(rounded.double() * scale, cache, common, 0.125, **keywords)
    assert error(out, want) < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_single_tokens_over_an_fp8_cache(monkeypatch, dtype):
    q, cache, common = batch(dtype, fp8=True, query=(1, 1, 0, 1))
    halved = torch.tensor([0, 0, 6, 6, 3, 3, 0, 0, 0, 0, 5, 5])
    q[:3] *= torch.exp2(-halved.float()).view(3, 4, 1)
    options = AttentionOptions(0.125, kv_cache_dtype="fp8_e4m3")
    fake = install(monkeypatch, FakeLibrary(common, options))
    meta = metadata(common, AttentionSpec(4, 2, 64, dtype, kv_cache_dtype="fp8_e4m3"))
    out = flash_attn.forward(q, cache, meta, options)
    assert (out[3:] == 0).all()
    rounded, scale_SK = reference_quantize_tokens(q, common.query_start_loc, 2)
    (call,) = fake.calls
    assert torch.equal(call["q_descale"], scale_SK)
    assert scale_SK[0, 0] > scale_SK[0, 1]
    want = reference_attention(q, cache, common, 0.125, kv_cache_dtype="fp8_e4m3")
    assert error(out, want) < 4e-2, "q is rounded to 3 bits behind the point"
    scale_TN = scale_SK[[0, 1, 3]].repeat_interleave(2, 1)
    q = rounded.double()
    q[:3] *= scale_TN[:, :, None]
    want = reference_attention(q, cache, common, 0.125, kv_cache_dtype="fp8_e4m3")
    assert error(out, want) < 5e-3


def test_fp8_needs_fa3(monkeypatch):
    common = batch(fp8=True)[2]
    options = AttentionOptions(0.125, kv_cache_dtype="fp8_e4m3")
    spec = AttentionSpec(4, 2, 64, torch.bfloat16, kv_cache_dtype="fp8_e4m3")
    install(monkeypatch, FakeLibrary(common, options, versions=(2,)))
    refusal = r"kv_cache_dtype must be auto with FA2.*supported"
    with pytest.raises(ValueError, match=refusal):
        metadata(common, spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version, refused in ((2, True), (3, False)):
        install(monkeypatch, FakeLibrary(common, options, versions=(version,)))
        backend = dataclasses.replace(BACKEND, unavailable=lambda: None)
        reasons = backend.reasons_against(spec, 16, torch.device("cuda"))
        assert [bool(re.match(refusal, reason)) for reason in reasons] == [True] * refused


@pytest.mark.parametrize("largest", [1.0, 448.0, 449.0, 1e-3, 0.0])
@pytest.mark.parametrize("strided", [False, True])
def test_quantized_queries(largest, strided):
    """The kernels, interpreted, and the reference beside them agree exactly."""
    rows, heads = 9, 3
    wide = torch.randn(11, heads, 96 if strided else 48).half()
    q = wide[..., :48]
    q[:rows] *= largest / q[:rows].abs().max() if largest else 0.0
    q[rows:] = float("nan")
    out, scale = quantize_query(q, rows)
    want, want_scale = reference_quantize_query(q, rows)
    assert torch.equal(scale, want_scale)
    assert torch.equal(out[:rows].float(), want[:rows].float())
    assert float(torch.frexp(scale)[0]) == 0.5, "a power of two"
    assert (out[:rows].double() * scale - q[:rows].double()).norm() <= 0.04 * q[:rows].norm()


@pytest.mark.parametrize("largest", [1.0, 448.0, 449.0, 1e-3, 0.0])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_quantized_tokens(largest, strided, num_kv_heads):
    """As above; requests 1 and 4 have no token, rows from 4 on are no request's."""
    starts = torch.tensor([0, 1, 1, 2, 3, 3, 4], dtype=torch.int32)
    q = torch.randn(6, 6, 96 if strided else 48)[..., :48].half()
    q[:4] *= torch.exp2(-torch.arange(24.0)).view(4, 6, 1) * (largest / q[0].abs().max())
    q[4:] = float("nan")
    out, scale = quantize_tokens(q, starts, num_kv_heads)
    want, want_scale = reference_quantize_tokens(q, starts, num_kv_heads)
    assert torch.equal(scale, want_scale)
    assert torch.equal(out[:4].float(), want[:4].float())
    assert (torch.frexp(scale)[0] == 0.5).all(), "powers of two"
    scale_TN = scale[[0, 2, 3, 5]].repeat_interleave(6 // num_kv_heads, 1)
    back = out[:4].double() * scale_TN[:, :, None]
    assert (back - q[:4].double()).norm() <= 0.04 * q[:4].norm()


def test_a_token_is_quantized_as_it_would_be_alone():
    """Padding requests, whose tokens may be NaN, touch nobody else."""
    q = torch.randn(3, 4, 32)
    q[1] = float("nan")
    q[2, 3, 5] = float("inf")
    together, scale = quantize_tokens(q, torch.arange(4, dtype=torch.int32), 2)
    for row in range(3):
        alone, own = quantize_tokens(q[row : row + 1], torch.tensor([0, 1], dtype=torch.int32), 2)
        assert torch.equal(scale[row : row + 1], own)
        assert torch.equal(together[row].view(torch.uint8), alone[0].view(torch.uint8))
    assert (scale[[0, 2]] <= 2.0**-6).all()


def test_other_requests_show_in_no_bit():
    q = torch.randn(6, 2, 32)
    alone, scale = quantize_query(q[:3], 3)
    q[3:] *= 50
    among, common_scale = quantize_query(q, 6)
    assert common_scale > scale
    same = (alone.double() * scale) == (among[:3].double() * common_scale)
    assert same[q[:3].abs() > 2.0**-5 * common_scale].all()


def check_varlen_keywords(monkeypatch, name, versions, q, k, v, options, common):
    calls = []

    def function(*arguments, **keywords):
        keywords |= dict(zip("qkv", arguments, strict=False))
        calls.append(keywords)
        if "out" in keywords:
            keywords["out"][:13] = 7
            return keywords["out"]
        return torch.full((13, 4, 64), 7.0, dtype=q.dtype)

    fake = types.SimpleNamespace(flash_attn_varlen_func=function)
    if versions:
        fake.is_fa_version_supported = lambda version: version in versions
    install(monkeypatch, fake, name)
    meta = AttentionMetadata(common, BACKEND)
    out = flash_attn.varlen(q, k, v, meta, options)
    assert (out[:13] == 7).all()
    assert (out[13:] == 0).all()
    return calls[0]


@pytest.mark.parametrize(
    ("name", "versions"),
    [("vllm_flash_attn", (3,)), ("vllm_flash_attn", (2,)), ("flash_attn_interface", ()),
     ("flash_attn", ())],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_without_a_cache(monkeypatch, name, versions, causal):
    q, _, common = batch()
    common.causal = causal
    k, v = torch.randn(2, 15, 2, 64, dtype=torch.bfloat16)
    options = AttentionOptions(0.125, sliding_window=4, soft_cap=5.0)
    call = check_varlen_keywords(monkeypatch, name, versions, q, k, v, options, common)
    assert call["k"].shape[0] == call["v"].shape[0] == 13, "no tile reaches into padding rows"
    assert call["window_size"] == (3, 0 if causal else 3)
    assert (call["causal"], call["softcap"], call["softmax_scale"]) == (causal, 5.0, 0.125)
    assert call["cu_seqlens_k"] is common.query_start_loc
    assert call["max_seqlen_k"] == 7


def test_sinks_without_a_cache(monkeypatch):
    q, _, common = batch()
    k, v = torch.randn(2, 15, 2, 64, dtype=torch.bfloat16)
    options = AttentionOptions(0.125, sinks=torch.randn(4))
    arguments = (q, k, v, options, common)
    call = check_varlen_keywords(monkeypatch, "vllm_flash_attn", (3,), *arguments)
    assert call["s_aux"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="sinks must be None with flash_attn"):
        check_varlen_keywords(monkeypatch, "flash_attn", (), *arguments)


def test_no_rows(monkeypatch):
    q, cache, common = batch()
    common.num_actual_tokens = 0
    options = AttentionOptions(0.125)
    install(monkeypatch, types.SimpleNamespace())
    meta = AttentionMetadata(common, BACKEND)
    assert (flash_attn.forward(q, cache, meta, options) == 0).all()
    assert (flash_attn.varlen(q, q[:, :2], q[:, :2], meta, options) == 0).all()


def test_a_build_of_before_fa3_is_refused_by_name(monkeypatch):
    """`vllm_flash_attn` 2.6.2 imports, and cannot say which kernels it has."""
    old = types.SimpleNamespace(flash_attn_varlen_func=None, flash_attn_with_kvcache=None)
    for name in library.LIBRARIES:
        monkeypatch.setitem(sys.modules, name, old if name == "vllm_flash_attn" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = AttentionSpec(8, 2, 128, torch.bfloat16)
    (reason,) = BACKEND.reasons_against(spec, 16, torch.device("cuda"))
    got, _, supported = reason.partition("; supported: ")
    assert got.endswith("got vllm_flash_attn of before FA3")
    assert "vllm_flash_attn as vLLM ships it" in supported


@pytest.mark.parametrize(("name", "sinks"), [("flash_attn", False), ("flash_attn_interface", True)])
def test_flash_attn_knows_what_upstream_libraries_refuse(monkeypatch, name, sinks):
    """`forward` refuses paged attention with upstream FA2, and sinks with upstream FA3."""
    fake = types.SimpleNamespace(flash_attn_varlen_func=None, flash_attn_with_kvcache=None)
    install(monkeypatch, fake, name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = AttentionSpec(8, 2, 128, torch.bfloat16, sinks=sinks)
    assert BACKEND.reasons_against(spec, 16, torch.device("cuda"))
