"""The option `attn_quant`: when attention is told to write quantized output."""

import dataclasses

import pytest
import torch

from attn_ops import get_backend
from attn_ops.backends import registry
from attn_ops.output_quant.schemes import OutputQuant
from fx_passes import PassConfig
from fx_passes.inductor_slot import AtenPipeline
from fx_passes.passes import quantize_output
from fx_passes.passes.quantize_output import QuantizeOutput, pays
from tests.fx_passes.passes.quantize_models import SCALE, Behind, given, group, tensor


def writes_static(name: str) -> bool:
    backend, _ = registry.load_backend(name)
    return backend is not None and "fp8_static" in backend.support.output_quant


@pytest.mark.skipped_when(QuantizeOutput, '`attn_quant` is "auto", and no backend')
def test_auto_asks_whether_a_backend_writes_the_scheme(batch, monkeypatch):
    cpu, static = torch.device("cpu"), OutputQuant("fp8_static")
    names = [name for name in registry.backend_names() if not writes_static(name)]
    monkeypatch.setattr(quantize_output, "backend_names", lambda: names)
    one = QuantizeOutput.of(PassConfig())
    assert one.run(Behind(batch(), given, SCALE).graph) == 0
    assert one.reasons == ["no backend on cpu writes fp8_static itself"]
    torch_backend = get_backend("TORCH")
    support = dataclasses.replace(torch_backend.support, output_quant=("fp8_static",))
    fusing = dataclasses.replace(torch_backend, name="FUSING", support=support)
    monkeypatch.setitem(registry._registered, "FUSING", fusing)
    names.append("FUSING")
    assert pays(static, 64, cpu) is None
    assert one.run(Behind(batch(), given, SCALE).graph) == 1
    missing = dataclasses.replace(fusing, unavailable=lambda: "it is not there")
    monkeypatch.setitem(registry._registered, "FUSING", missing)
    assert pays(static, 64, cpu) is not None


@pytest.mark.skipped_when(QuantizeOutput, '`attn_quant` is "auto", and no backend')
def test_auto_leaves_groups_of_several_heads(batch):
    """A group of 128 lies in two heads of 64."""
    one = QuantizeOutput.of(PassConfig())
    assert one.run(Behind(batch(), group).graph) == 0
    assert one.reasons == ["a scale of fp8_group128 is that of values of several heads"]
    assert pays(OutputQuant("fp8_group128"), 256, torch.device("cpu")) is None, (
        "by interpreted Triton"
    )


def test_the_option():
    config, rest = PassConfig.split({"attn_quant": "always"})
    assert (config.attn_quant, rest) == ("always", {})
    assert not PassConfig(attn_quant="never").is_on("attn_quant")
    with pytest.raises(ValueError, match="must be 'auto', 'always' or 'never', got True"):
        PassConfig.split({"attn_quant": True})
    with pytest.raises(ValueError, match="got 'quantize_output'; supported: attn_quant, coll"):
        PassConfig.split({"quantize_output": "always"})
    keys = {AtenPipeline(PassConfig(attn_quant=o)).uuid() for o in ("auto", "always", "never")}
    assert len(keys) == 3


@pytest.mark.skipped_when(QuantizeOutput, '`attn_quant` is "auto", and a scale')
def test_auto_leaves_a_scale_of_the_batch(batch):
    one = QuantizeOutput.of(PassConfig())
    assert one.run(Behind(batch(), tensor).graph) == 0
    (reason,) = one.reasons
    assert reason.startswith("a scale of the whole batch waits for all of attention")
    assert QuantizeOutput("always").run(Behind(batch(), tensor).graph) == 1
