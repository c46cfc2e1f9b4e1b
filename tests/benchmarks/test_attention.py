"""The attention benchmark: its run on a CPU, its counts, and the calls by hand."""

import argparse
import dataclasses
import json
import types

import pytest
import torch

from attn_ops import AttentionSpec, get_backend, register_backend
from attn_ops.backends import registry
from attn_ops.backends.measure import make_layers, make_step
from benchmarks import attention, direct
from graphs.app.bench import shape_of

SPEC = AttentionSpec(4, 2, 16, torch.bfloat16)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


@pytest.mark.slow
def test_smoke_run_prints_and_writes_everything(tmp_path, capsys):
    path = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--backends", "TORCH", "FLASH_ATTN", "--shapes", "2x8", "16"]
    attention.main([*arguments, "--json", str(path)])
    assert "FLASH_ATTN: a CUDA device must be present" in capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["command"] == f"python -m benchmarks.attention {' '.join(arguments)}"
    assert result["versions"]["torch"] == torch.__version__
    assert list(result["rows"]) == [
        "bf16, 2 x 8", "bf16, 16", "bf16, host us of a call", "E4M3 cache, 2 x 8", "E4M3 cache, 16"
    ]  # fmt: skip
    assert all(set(row) == {"TORCH"} for row in result["rows"].values())


def test_limits():
    """Keys and values at the rate of a copy; products over visible pairs at that of a product."""
    decode, prefill, rates = shape_of("2x24"), shape_of("8"), (1e9, 2e9)
    num_bytes = 2 * 2 * 24 * 2 * 16 * 2  # keys and values, requests, tokens, heads, size, bytes
    assert attention.limit_us(decode, SPEC, rates) == pytest.approx(num_bytes / 1e9 * 1e6)
    flops = 4 * 16 * 4 * (8 * 9 // 2)
    assert attention.limit_us(prefill, SPEC, rates) == pytest.approx(flops / 2e9 * 1e6)
    fp8 = dataclasses.replace(SPEC, kv_cache_dtype="fp8_e4m3")
    assert 2 * attention.kv_bytes(decode, fp8) == num_bytes


@pytest.mark.parametrize(
    ("text", "kv_cache_dtype", "layers"),
    [("64x8192", "auto", 2), ("8x4096", "auto", 32), ("1x32768", "fp8_e4m3", 64),
     ("1x1024", "auto", 64), ("1x1024", "fp8_e4m3", 90), ("2048", "auto", 22),
     ("16384", "auto", 2)],
)  # fmt: skip
def test_enough_layers_for_a_graph(monkeypatch, text, kv_cache_dtype, layers):
    gib, free = 1 << 30, [100 << 30]
    monkeypatch.setattr(attention, "l2_bytes", lambda device: 60 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 140 * gib))
    spec = AttentionSpec(32, 8, 128, torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    shape, cuda = shape_of(text), torch.device("cuda")
    num_bytes = attention.bytes_of_layers(shape, spec, cuda)
    assert num_bytes // attention.kv_bytes(shape, spec) == layers
    free[0] = gib
    assert attention.bytes_of_layers(shape, spec, cuda) <= gib // 2
    assert attention.bytes_of_layers(shape, spec, CPU) == 0


def test_a_timed_run_comes_after_one_that_is_not(monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "interval_us", lambda run, device: (run(), calls.append("end")))
    attention.after_itself_us(lambda: calls.append("run"), CPU)
    assert calls == ["run", "run", "end"]


def by_hand(layers, captured):
    meta = make_step(get_backend("TORCH"), layers).meta
    return lambda layer: layers.attend(meta, layer)


def fails(layers, captured):
    raise ImportError("no such library\nand a long trace")


@pytest.fixture
def row(monkeypatch, capsys):
    """A row of TORCH with a library by hand, and what is printed; 40 us, two layers."""
    monkeypatch.setattr(attention, "after_itself_us", lambda run, device: run() or 40.0)

    def measure(library, names=("TORCH",)):
        monkeypatch.setitem(direct.DIRECT, "TORCH", library)
        found = attention.measure(shape_of("2x8"), SPEC, names, 16, CPU, (1e9, 1e9))
        return found, capsys.readouterr().out

    return measure


def test_a_library_is_compared_and_timed(row):
    assert row(by_hand) == ({"TORCH": "20.0 (1.00, eager)"}, "")
    assert row(fails) == (
        {"TORCH": "20.0 (eager)"}, "TORCH by hand: ImportError: no such library\n"
    )  # fmt: skip
    found, printed = row(lambda layers, captured: lambda layer: 2 * by_hand(layers, False)(layer))
    assert printed == "TORCH by hand: differs from the first by 100.0%\n"
    assert found == {"TORCH": "20.0 (1.00, eager)"}


def test_one_backend_that_fails_stops_nobody(row):
    def forward(*arguments):
        raise RuntimeError("no such kernel\nand a long trace")

    register_backend(dataclasses.replace(get_backend("TORCH"), name="BROKEN", forward=forward))
    found, printed = row(by_hand, ("BROKEN", "TORCH"))
    assert printed == "BROKEN: RuntimeError: no such kernel\n"
    assert found == {"TORCH": "20.0 (1.00, eager)"}


def test_host_time_is_taken_in_groups():
    calls = []
    taken = attention.host_us(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, 3, 2
    )
    assert set(taken) == {"a", "b"}
    assert calls == list("aabb") * 4  # one group warms up, three are timed


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
    except NotImplementedError as error:  # xFormers' C++ extension needs the torch it was built for
        pytest.skip(str(error))
    want = reference(layers, 1)
    difference = (out.reshape(want.shape).float() - want.float()).norm() / want.float().norm()
    assert difference < 0.05  # FLASH_ATTN rounds q to FP8 where the cache is FP8
