"""The fuzzer itself: its oracle, what it catches, and that a seed is a case."""

import dataclasses
import json
import os
import time

import pytest
import torch

from attn_ops import AttentionOptions, get_backend
from attn_ops.backends import registry
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.output_quant.quantize import reference_quantize
from attn_ops.output_quant.schemes import SCHEMES
from attn_ops.testing.features import TOLERANCE
from benchmarks import fuzz_attention, fuzz_run
from benchmarks.fuzz_cases import draw_case, geometries_of
from benchmarks.fuzz_inputs import make_inputs
from benchmarks.fuzz_oracle import oracle
from benchmarks.fuzz_run import Config, Fuzzer, run_in_workers

CPU = torch.device("cpu")
TORCH = get_backend("TORCH")


def config_of(*backends: str) -> Config:
    return Config(backends, "cpu", num_geometries=40, geometry_seed=0, longest=60)


def outcomes_of(backend: str, seeds=range(40)) -> list[fuzz_run.Outcome]:
    fuzzer = Fuzzer(config_of(backend))
    return [fuzzer.run(seed) for seed in seeds]


@pytest.fixture
def broken(monkeypatch):
    """Makes TORCH with another forward known, for one test; its forward may be a closure."""

    def register(forward) -> str:
        changed = dataclasses.replace(TORCH, name="BROKEN", forward=forward)
        monkeypatch.setattr(registry, "_registered", {"BROKEN": changed})
        return "BROKEN"

    return register


def test_oracle_is_the_reference():
    """Without chunks, which the reference does not know; a shared prefix is nothing to either."""
    geometries = {"TORCH": geometries_of(TORCH, CPU, 40)}
    compared = 0
    for seed in range(80):
        case = draw_case(seed, [TORCH], geometries, 60)
        if case.attention_chunk_size is not None:
            continue
        inputs = make_inputs(case, TORCH, CPU)
        q, cache, _ = inputs.copies
        lse = torch.empty(q.shape[:2])
        common, scale = inputs.meta.common, inputs.asked.scale
        want = reference_attention(q, cache, common, scale, lse=lse, **inputs.options)
        out, out_lse = oracle(*inputs.copies, inputs.asked)
        torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(out_lse.float(), lse, rtol=1e-6, atol=1e-6)
        compared += 1
    assert compared > 50


def test_tolerances_are_those_of_the_conformance_suite():
    assert fuzz_run.TOLERANCE == TOLERANCE


def test_torch_passes():
    assert [o for o in outcomes_of("TORCH", range(60)) if o.kind != "ok"] == []


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.slow
def test_triton_passes_interpreted():
    fuzzer = Fuzzer(dataclasses.replace(config_of("TRITON"), longest=10))
    assert {fuzzer.run(seed).kind for seed in range(3)} == {"ok"}


def test_every_dimension_is_drawn():
    """Each yes and no of a case occurs among a few hundred."""
    geometries = {"TORCH": geometries_of(TORCH, CPU, 60)}
    cases = [draw_case(seed, [TORCH], geometries, 700) for seed in range(400)]
    for name in ("prefix_blocks", "writes", "strided_q", "num_padding_rows"):
        assert {bool(getattr(c, name)) for c in cases} == {False, True}
    for name in ("window", "lse", "cross", "cache_layout"):
        assert len({getattr(c.geometry, name) for c in cases}) == 2
    for name in ("alibi", "sinks", "causal", "soft_cap", "kv_cache_dtype", "attention_chunk_size"):
        assert len({getattr(c.spec, name) for c in cases}) > 1
    lengths = [pair for c in cases for pair in zip(c.query_lens, c.seq_lens, strict=True)]
    assert {(0, 0), (1, 0), (1, 1)} <= set(lengths)
    assert max(n for _, n in lengths) > 700
    assert any(q > n > 0 for q, n in lengths)


def test_schemes_are_drawn():
    """On a CPU those that the backend writes: else the reference is compared with itself."""

    def drawn(name, device):
        geometries = geometries_of(get_backend(name), torch.device(device), 200)
        return {g.quant.scheme for g in geometries if g.quant is not None}

    assert drawn("TORCH", "cuda") == drawn("TRITON", "cuda") == set(SCHEMES)
    assert drawn("TRITON", "cpu") == set(get_backend("TRITON").support.output_quant)
    assert drawn("TORCH", "cpu") == set()


def test_flashinfer_gets_what_its_conformance_compiles():
    geometries = geometries_of(get_backend("FLASHINFER"), torch.device("cuda"), 60)
    assert {(g.spec.head_size, g.block_size, g.lse) for g in geometries} == {(64, 16, False)}


def test_a_seed_is_a_case(capsys):
    """The same tensors, bit by bit, and the printed command draws that case."""
    fuzzer = Fuzzer(config_of("TORCH"))
    first, second = (
        make_inputs(draw_case(7, [TORCH], fuzzer.geometries, 60), TORCH, CPU) for _ in range(2)
    )
    for (now, must), (again, _) in zip(
        first.watched.values(), second.watched.values(), strict=True
    ):
        assert torch.equal(now, must)
        assert torch.equal(now, again)
    assert fuzzer.run(7).seed == Fuzzer(config_of("TORCH")).run(7).seed == 7


def test_one_key_too_many(broken):
    """NaN behind the last token makes it plain."""

    def forward(q, kv_cache, meta, options):
        seq_lens = meta.common.seq_lens_cpu
        room = meta.common.block_table_tensor.shape[1] * kv_cache.shape[2]
        longer = torch.where(seq_lens > 0, (seq_lens + 1).clamp(max=room), 0)
        more = meta.common.replace(seq_lens=longer, seq_lens_cpu=longer)
        return reference_attention(
            q, kv_cache, more, **_fields(options), compute_dtype=torch.float32
        ).to(q.dtype)

    kinds = [o.kind for o in outcomes_of(broken(forward))]
    assert kinds.count("mismatch") > 20


def _fields(options: AttentionOptions) -> dict:
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}


@pytest.mark.parametrize("place", ["guard block", "behind the last token", "first guard"])
def test_stray_writes(broken, place):
    """Results are right, but one byte elsewhere is not what it was."""

    def forward(q, kv_cache, meta, options):
        out = TORCH.forward(q, kv_cache, meta, options)
        block = {"guard block": 1, "behind the last token": -1, "first guard": 0}[place]
        kv_cache[block, 1, -1, -1, -1] = 1.0
        return out

    assert {o.kind for o in outcomes_of(broken(forward)) if "cache changed" in o.reason} == {
        "stray"
    }


def test_writes_around_lse(broken):
    """In the parts of a cascade lse is the operator's own and has no guards."""

    def forward(q, kv_cache, meta, options):
        out, lse = TORCH.forward(q, kv_cache, meta, options), options.lse
        if lse is not None and lse.untyped_storage().nbytes() > lse.nbytes:
            behind = lse.as_strided((1,), (1,), lse.storage_offset() + lse.numel())
            behind.fill_(7)
        return out

    found = [o for o in outcomes_of(broken(forward)) if o.kind != "ok"]
    assert {(o.kind, o.reason) for o in found} == {("stray", "around lse changed")}


def test_one_wrong_row(broken):
    """A row of many that is a little off hides in the norm of all."""

    def forward(q, kv_cache, meta, options):
        out = TORCH.forward(q, kv_cache, meta, options)
        if meta.common.num_actual_tokens > 1 and options.lse is None:
            out[meta.common.num_actual_tokens // 2] *= 1 + 6 * TOLERANCE[q.dtype]
        return out

    reasons = [o.reason for o in outcomes_of(broken(forward), range(80))]
    assert sum("a row's error too large" in r for r in reasons) > 20
    assert "a row's error too large" in reasons  # with the norm of all in order


def test_a_wrong_scale(monkeypatch):
    """A backend that says that it quantizes, by twice the scale that it returns."""

    def forward(q, kv_cache, meta, options):
        plain = TORCH.forward(q, kv_cache, meta, dataclasses.replace(options, quant=None))
        if options.quant is None:
            return plain
        out, scales = reference_quantize(plain * 2, options.quant.how, options.quant.out_scale)
        options.quant.scales.copy_(scales)
        return out

    support = dataclasses.replace(TORCH.support, output_quant=("fp8_static", "fp8_group64"))
    changed = dataclasses.replace(TORCH, name="BROKEN", forward=forward, support=support)
    monkeypatch.setattr(registry, "_registered", {"BROKEN": changed})
    bad = [o for o in outcomes_of("BROKEN", range(120)) if o.kind != "ok"]
    assert bad
    assert all("steps" in o.reason and "OutputQuant(scheme='fp8_" in o.reason for o in bad)


def test_failures_are_printed_and_the_run_goes_on(broken, capsys, tmp_path):
    def forward(q, kv_cache, meta, options):
        if q.shape[0] % 3 == 1:
            raise RuntimeError("of all things")
        if q.shape[0] % 3 == 2:
            raise ValueError("q must not have so many rows")
        return TORCH.forward(q, kv_cache, meta, options)

    path = tmp_path / "report.json"
    arguments = f"--batches 20 --device cpu --longest 30 --json {path} --backends "
    assert fuzz_attention.main([*arguments.split(), broken(forward)]) == 1
    report = json.loads(path.read_text())
    (row,) = report["backends"]
    assert row["cases"] == 20
    assert row["errors"] == len(report["failures"]) > 0
    assert report["refused"] == {"BROKEN: q must not have so many rows": row["refused"]}
    failure, printed = report["failures"][0], capsys.readouterr().out
    assert "RuntimeError: of all things" in printed
    assert failure["command"] in printed
    assert "query_lens: " in printed
    command = failure["command"].split("fuzz_attention ")[1].split()
    assert fuzz_attention.main(command) == 1
    assert failure["case"].strip() in capsys.readouterr().out


def test_a_run_without_failures(capsys):
    assert (
        fuzz_attention.main(["--batches=5", "--device=cpu", "--longest=30", "--backends=TORCH"])
        == 0
    )
    assert "5 of 5 cases" in capsys.readouterr().out
    with pytest.raises(ValueError, match="backends must run on cpu, got FLASH_ATTN"):
        fuzz_attention.main(["--device=cpu", "--backends=FLASH_ATTN"])


def test_a_geometry_has_one_worker():
    config = config_of("TORCH")
    dealt, fuzzer = fuzz_run.deal(config, list(range(200)), 4), Fuzzer(config)
    assert sorted(seed for seeds in dealt.values() for seed in seeds) == list(range(200))
    places = {
        worker: {draw_case(s, [TORCH], fuzzer.geometries, 60).geometry for s in seeds}
        for worker, seeds in dealt.items()
    }
    assert sum(map(len, places.values())) == len(set().union(*places.values())) > 20


@pytest.mark.slow
def test_workers():
    """Every seed once, whichever process ran it."""
    found = list(run_in_workers(config_of("TORCH"), list(range(6)), time.monotonic() + 300, 2))
    assert sorted(o.seed for o in found) == list(range(6))
    assert {o.kind for o in found} == {"ok"}


def tell_once_and_die(config, results, worker, seeds, deadline):
    results.put((worker, fuzz_run.Outcome(seeds[0], "TORCH", "ok")))
    results.close()
    results.join_thread()
    os._exit(9)


@pytest.mark.slow
def test_a_worker_that_dies_costs_one_case(monkeypatch):
    monkeypatch.setattr(fuzz_run, "_work", tell_once_and_die)
    found = list(run_in_workers(config_of("TORCH"), [1, 2, 3], time.monotonic() + 300, 1))
    assert [(o.seed, o.kind) for o in found] == [(1, "ok"), (2, "error"), (3, "ok")]
    assert "exit status 9" in found[1].reason
    assert "query_lens" in found[1].case
