"""The attention benchmark: its run on a CPU, its counts, its bars, and the calls by hand."""

import argparse
import dataclasses
import json
import types

import pytest
import torch

from attn_ops import AttentionSpec, get_backend, register_backend
from attn_ops.backends import registry
from attn_ops.backends.measure import make_layers, make_step
from benchmarks import attention, attention_cases, direct
from benchmarks.attention_bars import Bar, all_bars
from benchmarks.attention_cases import Case, Row, Setting, host_us, measure_case

SPEC = AttentionSpec(4, 2, 16, torch.bfloat16)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def setting(names=("TORCH",), **changes):
    """A fake clock: 40 us for every run."""

    def interval(run):
        run()
        return 40.0

    fields = {
        "names": names, "block_size": 16, "device": CPU, "rounds": 2, "interval": interval,
        "bytes_per_second": 1e9, "flops_per_second": 1e9, "prepare_seconds": 60.0,
    }  # fmt: skip
    return Setting(**(fields | changes))


@pytest.mark.slow
def test_smoke_run_prints_and_writes_everything(tmp_path, capsys):
    path = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--quick", "--backends", "TORCH", "FLASH_ATTN"]
    attention.main([*arguments, "--json", str(path), "--shapes", "2x8", "16"])
    printed = capsys.readouterr().out
    for text in ("fp8 KV cache", "TORCH *", "CUDA device must be present", "bars: 4 met"):
        assert text in printed
    result = json.loads(path.read_text())
    assert result["versions"]["torch"] == torch.__version__
    assert {(r["dtype"], r["shape"], r["backend"]) for r in result["rows"]} == {
        (dtype, shape, name)
        for dtype in ("bf16", "fp8")
        for shape in ("2x8", "16")
        for name in ("TORCH", "FLASH_ATTN")
    }
    for row in result["rows"]:
        assert (row["ours_us"] is None) == (row["backend"] == "FLASH_ATTN") == bool(row["reason"])
    assert [o["backend"] for o in result["overhead"]] == ["TORCH", "FLASH_ATTN"]
    assert result["overhead"][0]["ours_us"] > 0


def test_figures_of_a_fake_clock():
    """40 us for two layers: 20 us each."""
    decode, prefill = Case.parse("2x24"), Case.parse("8")
    (row,) = measure_case(decode, "bf16", SPEC, "TORCH", setting())
    assert (row.ours_us, row.layers, row.default, row.captured) == (20.0, 2, True, False)
    assert row.direct_us is None
    num_bytes = 2 * 2 * 24 * 2 * 16 * 2  # keys and values, requests, tokens, heads, size, bytes
    assert row.percent == pytest.approx(100 * num_bytes / 20e-6 / 1e9)
    (row,) = measure_case(prefill, "bf16", SPEC, None, setting())
    assert row.percent == pytest.approx(100 * 4 * 16 * 4 * (8 * 9 // 2) / 20e-6 / 1e9)
    assert not row.default


@pytest.mark.parametrize(
    ("text", "kv_cache_dtype", "layers"),
    [("64x8192", "auto", 2), ("8x4096", "auto", 32), ("1x32768", "fp8_e4m3", 64),
     ("1x1024", "auto", 64), ("1x1024", "fp8_e4m3", 90), ("2048", "auto", 22),
     ("16384", "auto", 2)],
)  # fmt: skip
def test_enough_layers_for_a_graph(monkeypatch, text, kv_cache_dtype, layers):
    gib, free = 1 << 30, [100 << 30]
    monkeypatch.setattr(attention_cases, "l2_bytes", lambda device: 60 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 140 * gib))
    spec = AttentionSpec(32, 8, 128, torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    case, cuda = Case.parse(text), torch.device("cuda")
    assert attention_cases.bytes_of_layers(case, spec, cuda) // case.kv_bytes(spec) == layers
    free[0] = gib
    assert attention_cases.bytes_of_layers(case, spec, cuda) <= gib // 2
    assert attention_cases.bytes_of_layers(case, spec, CPU) == 0


def test_a_timed_run_comes_after_one_that_is_not(monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "interval_us", lambda run, device: (run(), calls.append("end")))
    attention.after_itself_us(lambda: calls.append("run"), CPU)
    assert calls == ["run", "run", "end"]


def test_an_fp8_cache_is_read_with_half_the_bytes():
    fp8 = dataclasses.replace(SPEC, kv_cache_dtype="fp8_e4m3")
    case = Case.parse("3x100")
    assert 2 * case.kv_bytes(fp8) == case.kv_bytes(SPEC)


@pytest.mark.parametrize("text", ["", "0x5", "8x", "1x2x3", "many", "-4"])
def test_shapes_that_are_none(text):
    with pytest.raises(ValueError, match="shape must be REQUESTSxCONTEXT or TOKENS"):
        Case.parse(text)


def raise_with_a_long_trace(*arguments):
    raise RuntimeError("no such kernel\nand a long trace")


class Chooses(get_backend("TORCH").builder):
    """Its metadata is TORCH's."""

    def build(self, *arguments, **keywords):
        meta = super().build(*arguments, **keywords)
        meta.backend = get_backend("TORCH")
        return meta


def test_one_backend_that_fails_stops_nobody(monkeypatch):
    changed = dataclasses.replace(
        get_backend("TORCH"), name="BROKEN", forward=raise_with_a_long_trace
    )
    register_backend(changed)
    broken, torch_row = measure_case(
        Case.parse("2x8"), "bf16", SPEC, "TORCH", setting(("BROKEN", "TORCH"))
    )
    assert broken.reason == "RuntimeError: no such kernel"
    assert torch_row.ours_us == 20.0


def test_a_backend_that_chooses_another_says_which(monkeypatch, capsys):
    """And is the default with its own times."""
    register_backend(dataclasses.replace(get_backend("TORCH"), name="CHOOSES", builder=Chooses))
    names = ("CHOOSES", "TORCH")
    rows = measure_case(Case.parse("2x8"), "bf16", SPEC, "CHOOSES", setting(names))
    assert [row.runs for row in rows] == ["TORCH", None]
    rows[1].ours_us = 10.0
    (bar,) = all_bars(rows, [])
    assert (bar.what, bar.measured) == ("best / default: TORCH / CHOOSES bf16 2x8", 0.5)
    attention.show(
        {
            "rows": [dataclasses.asdict(row) for row in rows], "overhead": [], "device": "cpu",
            "bars": [bar.as_dict()], "copy_bytes_per_second": 1.0, "matmul_flops_per_second": 1.0,
            "seconds": 1.0, "commit": None,
        },
        attention.Console(width=200),
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "runs TORCH" in printed
    assert 'eager: not in a graph, so without a bar "direct / operator"' in printed


def by_hand(layers, captured):
    backend = get_backend("TORCH")
    meta = make_step(backend, layers).meta
    return lambda layer: layers.attend(meta, layer)


def test_a_library_is_compared_and_timed(monkeypatch):
    times = {"ours": 40.0, "direct": 30.0}
    monkeypatch.setitem(direct.DIRECT, "TORCH", by_hand)
    monkeypatch.setattr(
        attention_cases, "interleaved_us",
        lambda runs, rounds, interval: {key: times[key.split()[1]] for key in runs},
    )  # fmt: skip
    (row,) = measure_case(Case.parse("2x8"), "bf16", SPEC, "TORCH", setting())
    assert (row.direct_us, row.ratio, row.difference) == (15.0, 0.75, 0.0)
    assert row.direct_reason is None


def test_a_library_that_fails_or_differs_is_said(monkeypatch):
    def fails(layers, captured):
        raise ImportError("no such library")

    monkeypatch.setitem(direct.DIRECT, "TORCH", fails)
    (row,) = measure_case(Case.parse("2x8"), "bf16", SPEC, "TORCH", setting())
    assert (row.ours_us, row.direct_reason) == (20.0, "ImportError: no such library")
    other = lambda layers, captured: lambda layer: by_hand(layers, captured)(layer) * 2  # noqa: E731
    monkeypatch.setitem(direct.DIRECT, "TORCH", other)
    (row,) = measure_case(Case.parse("2x8"), "bf16", SPEC, "TORCH", setting())
    assert row.direct_reason == "its output differs from the operator's by 50.0%"


def test_who_compiles_too_long_is_skipped():
    slow = setting(prepare_seconds=5.0)
    slow.spent["TORCH"] = 6.0
    (row,) = measure_case(Case.parse("2x8"), "bf16", SPEC, "TORCH", slow)
    assert row.ours_us is None
    assert "it has compiled for 6 s" in str(row.reason)


def test_an_error_while_timing_is_a_reason():
    calls = []

    def interval(run):
        calls.append(run)
        if len(calls) > 2:  # two runs warm up
            raise RuntimeError("device lost")
        return 1.0

    (row,) = measure_case(Case.parse("2x8"), "bf16", SPEC, "TORCH", setting(interval=interval))
    assert (row.ours_us, row.reason) == (None, "RuntimeError: device lost")


def test_host_time_is_taken_in_groups():
    calls = []
    taken = host_us({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, 6, 2)
    assert set(taken) == {"a", "b"}
    assert calls == list("aabb") * 4  # one group warms up, three are timed


def row(backend, shape, ours, direct_us=None, **fields):
    kind = "decode" if "x" in shape else "prefill"
    ratio = direct_us / ours if direct_us and ours else None
    fields.setdefault("captured", True)
    return Row(
        "bf16", shape, kind, backend, ours_us=ours, direct_us=direct_us, ratio=ratio, **fields
    )


def test_bars():
    rows = [
        row("FLASH_ATTN", "64x8192", 101.0, 100.0, default=True),
        row("TRITON", "64x8192", 110.0, 110.0),
        row("FAST", "64x8192", 90.0, quantizes_query=True),
        row("FLASH_ATTN", "1x1024", 10.0, 10.0, default=True, planned_us=12.0),
        row("TRITON", "1x1024", 11.0, 10.0),
        row("FLASH_ATTN", "2048", None, default=True),
        row("TRITON", "2048", 30.0),
        row("FLEX", "2048", 60.0, 30.0, captured=False),
    ]
    overhead = [
        {"dtype": "bf16", "backend": "TRITON", "ours_us": 20.0, "direct_us": 7.0,
         "difference_us": 13.0},
        {"dtype": "bf16", "backend": "FLASHINFER", "reason": "none"},
    ]  # fmt: skip
    found = {bar.what: (bar.measured, bar.verdict) for bar in all_bars(rows, overhead)}
    assert found == {
        "direct / operator: FLASH_ATTN bf16 64x8192": (100 / 101, "met"),
        "direct / operator: TRITON bf16 64x8192": (1.0, "met"),
        "direct / operator: FLASH_ATTN bf16 1x1024": (1.0, "met"),
        "direct / operator: TRITON bf16 1x1024": (10 / 11, "missed"),
        "direct / operator: TRITON bf16 2048": (None, "not measured"),
        "best / default: FLASH_ATTN / FLASH_ATTN bf16 64x8192": (1.0, "met"),
        "best / default: FLASH_ATTN / FLASH_ATTN bf16 1x1024": (1.0, "met"),
        "best / default: TRITON / FLASH_ATTN bf16 2048": (None, "not measured"),
        "FA3 / TRITON: bf16 64x8192": (100 / 110, "met"),
        "FA3 / TRITON: bf16 1x1024": (10 / 11, "missed"),
        "FA3 with its scheduler / TRITON: bf16 1x1024": (12 / 11, "met"),
        "FA3 / TRITON: bf16 2048": (None, "not measured"),
        "host overhead, us: TRITON bf16": (13.0, "missed"),
    }


def test_relations():
    assert Bar("", ">", 1.0, 1.0).verdict == "missed"
    assert Bar("", ">=", 1.0, 1.0).verdict == "met"
    assert Bar("", "<=", 12.0, 12.0).verdict == "met"


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="backend must be known, got 'NONE'; supported: AUTO"):
        attention.chosen_backends(["NONE"], CPU)
    assert "TORCH" not in attention.chosen_backends([], torch.device("cuda"))


def reference(layers, layer):
    return layers.attend(make_step(get_backend("TORCH"), layers).meta, layer)


def close(out, want):
    difference = (out.reshape(want.shape).float() - want.float()).norm() / want.float().norm()
    return difference < 0.02


SHAPES = {"decode": ((1, 1), (40, 40)), "prefill": ((40,), (40,))}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_gathered_keys_through_flex(monkeypatch, kind, kv_cache_dtype):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    spec = dataclasses.replace(SPEC, kv_cache_dtype=kv_cache_dtype)
    layers = make_layers(spec, SHAPES[kind], 16, CPU, 0)
    assert close(direct.flex(layers, False)(1), reference(layers, 1))


@pytest.mark.parametrize("kind", SHAPES)
def test_triton_without_the_operator(kind):
    from attn_ops.backends.triton import BACKEND

    if missing := BACKEND.unavailable():
        pytest.skip(missing)
    spec = dataclasses.replace(SPEC, dtype=torch.float32)
    layers = make_layers(spec, SHAPES[kind], 16, CPU, 0)
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted where there is a GPU")
    assert close(direct.triton(layers, False)(0), reference(layers, 0))


def test_xformers_finds_keys_and_values_in_one_view(monkeypatch):
    """Its pages: those of keys and values in turn, in a cache that cannot be viewed otherwise."""
    layers = make_layers(SPEC, SHAPES["decode"], 16, CPU, 0)
    want = reference(layers, 1)

    def from_seqlens(q_lens, kv_lens, tables, page_size, device):
        assert page_size == 16
        return argparse.Namespace(tables=tables, lens=kv_lens)

    def attend(q, k, v, bias, scale, op):
        assert op.BLOCK_N == 16
        outs = []
        for request, tokens in enumerate(bias.lens):
            rows = (bias.tables[request].long()[:, None] * 16 + torch.arange(16)).flatten()[:tokens]
            k_CKGH, v_CKGH = k[0, rows].float(), v[0, rows].float()
            scores = scale * torch.einsum("kgh,ckgh->kgc", q[0, request].float(), k_CKGH)
            outs.append(torch.einsum("kgc,ckgh->kgh", scores.softmax(-1), v_CKGH))
        return torch.stack(outs)[None]

    mask = argparse.Namespace(from_seqlens=from_seqlens)
    fmha = types.SimpleNamespace(
        attn_bias=types.SimpleNamespace(PagedBlockDiagonalCausalWithOffsetPaddedKeysMask=mask),
        memory_efficient_attention_forward=attend,
    )
    modules = {
        "xformers.ops.fmha": fmha,
        "xformers.ops.fmha.triton_splitk": types.SimpleNamespace(
            FwOp=type("FwOp", (), {"BLOCK_N": 64}), Inputs=None
        ),
    }
    monkeypatch.setattr(direct.importlib, "import_module", modules.__getitem__)
    operator = direct.operator.__wrapped__  # its cache would keep the stand-in
    monkeypatch.setattr(direct, "operator", operator)
    assert close(direct.xformers(layers, False)(1), want)


def test_xformers_without_its_extension_has_no_prefill(monkeypatch):
    def refuses(*arguments, **options):
        raise NotImplementedError("No operator found for inputs:\n and a list of them")

    fmha = types.SimpleNamespace(
        attn_bias=types.SimpleNamespace(LowerTriangularFromBottomRightMask=object),
        memory_efficient_attention_forward=refuses,
    )
    monkeypatch.setattr(direct.importlib, "import_module", {"xformers.ops.fmha": fmha}.__getitem__)
    attend = direct.xformers(make_layers(SPEC, SHAPES["prefill"], 16, CPU, 0), False)
    with pytest.raises(ValueError, match="not available for a prefill: xFormers has no operator"):
        attend(0)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_flash_attn_starts_from_the_models_query(monkeypatch, kv_cache_dtype):
    """With an FP8 cache a cast is in the call, as rounding q is in the operator's."""
    calls = []
    library = types.SimpleNamespace(
        is_fa_version_supported=lambda version: True,
        get_scheduler_metadata=lambda **keywords: keywords["qkv_dtype"],
        flash_attn_varlen_func=lambda q, k, v, *rest, **keywords: calls.append((q, k, keywords)),
    )
    monkeypatch.setattr(direct, "vllm_flash_attn", lambda: library)
    spec = dataclasses.replace(SPEC, kv_cache_dtype=kv_cache_dtype)
    layers = make_layers(spec, SHAPES["decode"], 16, CPU, 0)
    attend = direct.flash_attn(layers, False)
    layers.queries[1].fill_(3.0)  # after what is prepared
    attend(1)
    ((q, k, keywords),) = calls
    assert q.dtype == k.dtype == keywords["scheduler_metadata"]
    assert (q.float() == 3.0).all()
    assert ("q_descale" in keywords) == (kv_cache_dtype != "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("name", direct.DIRECT)
def test_libraries_by_hand_compute_what_the_operator_does(name, kv_cache_dtype, kind):
    spec = AttentionSpec(32, 8, 128, torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    # The benchmark's shortest prompt: for 40 tokens Inductor has no tile of FlexAttention.
    lengths = ((2048,), (2048,)) if kind == "prefill" else SHAPES[kind]
    layers = make_layers(spec, lengths, 16, torch.device("cuda"), 0)
    try:
        attend = direct.DIRECT[name](layers, False)
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    try:
        out = attend(1)
    except ValueError as error:  # of xFormers' C++ extension, which another torch does not load
        if "not available for a prefill" not in str(error):
            raise
        pytest.skip(str(error))
    want = reference(layers, 1)
    difference = (out.reshape(want.shape).float() - want.float()).norm() / want.float().norm()
    assert difference < 0.05  # FLASH_ATTN rounds q to FP8 where the cache is FP8
