"""The fuzzer on backends of latent attention: its oracle, and what it catches."""

import dataclasses

import pytest
import torch

from attn_ops import get_backend
from attn_ops.backends import registry
from attn_ops.backends.mla.torch_mla import reference_mla_attention
from attn_ops.metadata import LatentOptions
from benchmarks.fuzz_cases import draw_case, geometries_of
from benchmarks.fuzz_inputs import make_inputs
from benchmarks.fuzz_oracle import oracle
from benchmarks.fuzz_run import Config, Fuzzer

CPU = torch.device("cpu")
TORCH_MLA = get_backend("TORCH_MLA")


def outcomes_of(backend: str, seeds=range(25)) -> list:
    fuzzer = Fuzzer(Config((backend,), "cpu", num_geometries=40, geometry_seed=0, longest=300))
    return [fuzzer.run(seed) for seed in seeds]


@pytest.fixture
def broken(monkeypatch):
    """Makes TORCH_MLA with another forward known, for one test."""

    def register(forward) -> str:
        changed = dataclasses.replace(TORCH_MLA, name="BROKEN", forward=forward)
        monkeypatch.setattr(registry, "_registered", {"BROKEN": changed})
        return "BROKEN"

    return register


def test_torch_mla_passes():
    assert [o for o in outcomes_of("TORCH_MLA") if o.kind != "ok"] == []


def test_oracle_is_the_reference():
    geometries = {"TORCH_MLA": geometries_of(TORCH_MLA, CPU, 40)}
    for seed in range(30):
        case = draw_case(seed, [TORCH_MLA], geometries, 60)
        inputs = make_inputs(case, TORCH_MLA, CPU)
        q, cache, _ = inputs.copies
        lse = torch.empty(q.shape[:2])
        options = LatentOptions(inputs.asked.scale, inputs.kv_b, lse=lse, **inputs.options)
        want = reference_mla_attention(q, cache, inputs.meta.common, options)
        out, out_lse = oracle(*inputs.for_oracle(case), inputs.asked)
        out = out[..., : case.spec.latent.v_head_dim]
        torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(out_lse.float(), lse, rtol=1e-6, atol=1e-6)


def test_both_ways_and_every_dimension_are_drawn():
    geometries = {"TORCH_MLA": geometries_of(TORCH_MLA, CPU, 60)}
    cases = [draw_case(seed, [TORCH_MLA], geometries, 700) for seed in range(200)]
    for name in ("writes", "strided_q", "num_padding_rows", "workspace"):
        assert {bool(getattr(c, name)) for c in cases} == {False, True}
    assert {c.spec.kv_cache_dtype for c in cases} == {"auto", "fp8_e4m3", "fp8_e5m2"}
    assert {c.geometry.lse for c in cases} == {False, True}
    kinds = set()
    for case in cases[:60]:
        plan = make_inputs(case, TORCH_MLA, CPU).meta.planned(case.spec)
        chunks = () if plan.prefill is None else plan.prefill.chunks
        kinds.add((plan.decode is not None, len(chunks) > 0, len(chunks) > 1))
    assert {(True, False, False), (False, True, False), (True, True, True)} <= kinds


def test_one_key_too_few(broken):
    def forward(q, kv_cache, meta, options, plan=None):
        fewer = (meta.common.seq_lens_cpu - 1).clamp(min=0)
        part = meta.common.replace(seq_lens=fewer, seq_lens_cpu=fewer)
        return reference_mla_attention(q, kv_cache, part, options, torch.float32).to(q.dtype)

    kinds = [o.kind for o in outcomes_of(broken(forward))]
    assert kinds.count("ok") < 10


def test_stray_writes(broken):
    def forward(q, kv_cache, meta, options, plan=None):
        out = TORCH_MLA.forward(q, kv_cache, meta, options, plan)
        kv_cache[1, -1, -1] = 1.0
        return out

    assert "stray" in {o.kind for o in outcomes_of(broken(forward))}
