"""Sessions under debugging, inference mode, default devices and dtypes, and changed models."""

import pytest
import torch

from attn_ops.backends.grouped import grouped_backend
from graphs import CUDAGraphMode
from graphs.capture.verifier import Verifier
from tests.kit.sessions import PROMPTS, captured_lazily, uncaptured

PENALIZED = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}


@pytest.mark.parametrize("mode", [m for m in CUDAGraphMode if m is not CUDAGraphMode.NONE])
def test_debugging_lowers_grouped_backends(make_model, mode, caplog):
    model = make_model("gemma2")
    sliding = grouped_backend({(lambda s: s.sliding_window is not None): "TORCH"}, default="FLEX")
    session = captured_lazily(model, backend=sliding, cudagraph_mode=mode, max_tokens=32)
    assert session.graph_mode is CUDAGraphMode.PIECEWISE
    assert session.graph_mode_why.startswith("debug='eager_replay'")
    if mode is not CUDAGraphMode.PIECEWISE:
        assert f"{mode.name} asked for" in session.graph_mode_why
        assert "TORCH has level NEVER" in session.graph_mode_why
    assert "asked for and used" not in caplog.text
    assert session.generate([[1, 2, 3]], 6) == uncaptured(model).generate([[1, 2, 3]], 6)


def test_debugging_is_logged_as_such(model, caplog):
    caplog.set_level("INFO", "graphs")
    session = captured_lazily(model, cudagraph_mode="FULL")
    assert session.graph_mode is CUDAGraphMode.FULL
    assert "FULL asked for, run by debug='eager_replay'" in caplog.text


def test_inside_and_outside_of_inference_mode(model):
    want = uncaptured(model).generate(PROMPTS, 9, **PENALIZED)
    for first_inside in (True, False):
        with torch.inference_mode(first_inside):
            session = captured_lazily(model, decode_steps=4)
            assert session.generate(PROMPTS, 9, **PENALIZED) == want
        with torch.inference_mode(not first_inside):
            assert session.generate(PROMPTS, 9, **PENALIZED) == want
    with torch.inference_mode():
        session = uncaptured(model)
    assert session.generate(PROMPTS, 9, **PENALIZED) == want


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_devices_and_dtypes_change_nothing(model, dtype):
    asked = PENALIZED | {"top_p": 0.9, "logit_bias": {7: 1.0}, "min_tokens": 3, "eos": 5}
    want = uncaptured(model).generate(PROMPTS, 9, **asked)
    session = captured_lazily(model, decode_steps=4)
    torch.set_default_device("meta")
    torch.set_default_dtype(dtype)
    try:
        assert session.generate(PROMPTS, 9, **asked) == want
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_a_verifier_of_ones_own(model, tmp_path):
    verifier = Verifier("always", strict_writes=True, directory=tmp_path)
    session = captured_lazily(model, verify=verifier)
    assert session.generate(PROMPTS, 4) == uncaptured(model).generate(PROMPTS, 4)
    assert session.verifier is verifier
    assert verifier.num_checked > 0
    assert captured_lazily(model, verify=Verifier(None)).verifier is None
    with pytest.raises(ValueError, match="verify must be made for kv_cache_dtype='auto'"):
        captured_lazily(model, verify=Verifier("first", kv_cache_dtype="fp8_e4m3"))
