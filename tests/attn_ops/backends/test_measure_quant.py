"""Attention that quantizes its output, timed against a kernel behind it."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_ops import AttentionSpec
from attn_ops.backends import measure_quant
from attn_ops.backends.measure_quant import Pair, Setting, pairs, time_pair
from attn_ops.output_quant.schemes import SCHEMES, OutputQuant

CPU = torch.device("cpu")
SPEC = AttentionSpec(4, 2, 64, torch.bfloat16)
DECODES = ((1, 1), (9, 5))


@pytest.fixture
def ways(monkeypatch):
    """The values of `fuse` that layers are made with."""
    asked, quantized = [], measure_quant.quantized

    def noted(*arguments, fuse):
        asked.append(fuse)
        return quantized(*arguments, fuse=fuse)

    monkeypatch.setattr(measure_quant, "quantized", noted)
    return asked


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s not in ("nvfp4", "fp8_group128")])
def test_both_ways_are_timed(scheme, ways):
    """One, where the backend leaves the scheme to a kernel behind."""
    for backend, fuses in (("TRITON", scheme != "fp8_tensor"), ("TORCH", False)):
        ways.clear()
        setting = Setting(backend, SPEC, OutputQuant(scheme), 16, CPU)
        pair = time_pair(setting, DECODES)
        assert min(pair) > 0
        assert ways == ([True, False] if fuses else [False])
        assert fuses or pair.fused == pair.apart


@pytest.mark.parametrize(
    "asked",
    [
        {"sliding_window": 8, "soft_cap": 20.0},
        {"alibi": True, "sinks": True},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"attention_chunk_size": 8},
        {"causal": False},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_layers_of_any_kind(asked):
    spec = AttentionSpec(4, 2, 64, torch.float32, **asked)
    found = pairs(spec, OutputQuant("fp8_row"), 4, CPU, None)
    assert all(isinstance(pair, Pair) for pair in found.values())


def test_tensors_are_real_where_a_compilation_has_fake_ones(tmp_path):
    path = tmp_path / "times.json"
    with FakeTensorMode(), torch.inference_mode():
        found = pairs(SPEC, OutputQuant("fp8_row"), 4, CPU, path)
    assert len(found) == 2
    assert all(min(pair) > 0 for pair in found.values())
    keys = [json.loads(key) for key in json.loads(path.read_text())["entries"]]
    assert [key["shapes"] for key in keys] == [[[[1, 1], [32, 32]]], [[[16], [16]]]]
    assert pairs(SPEC, OutputQuant("fp8_row"), 4, CPU, path) == found


def test_a_file_may_hold_backends_and_pairs(tmp_path):
    """One of `select_backend`, which reads what is written here, and the other way round."""
    from attn_ops import select_backend

    path = tmp_path / "times.json"
    found = pairs(SPEC, OutputQuant("fp8_row"), 4, CPU, path)
    how = {"block_size": 4, "device": "cpu", "measure": True, "measurements": path}
    chosen = select_backend(SPEC, shapes=[([1], [5])], **how)
    assert select_backend(SPEC, shapes=[([1], [5])], **how).why == chosen.why
    assert pairs(SPEC, OutputQuant("fp8_row"), 4, CPU, path) == found


def test_what_fails_is_said(monkeypatch, tmp_path):
    """It is tried again: nothing of it is in the file."""

    def fail(setting, lengths):
        raise RuntimeError("no kernel image\nand what follows")

    monkeypatch.setattr(measure_quant, "time_pair", fail)
    path = tmp_path / "times.json"
    found = pairs(SPEC, OutputQuant("fp8_row"), 4, CPU, path)
    assert set(found.values()) == {"RuntimeError: no kernel image"}
    assert not path.exists()
    odd = AttentionSpec(4, 2, 64, torch.float32, attention_chunk_size=8, sinks=True)
    refused = pairs(odd, OutputQuant("fp8_row"), 3, torch.device("meta"), None)
    assert all("no backend supports these layers" in why for why in refused.values())
