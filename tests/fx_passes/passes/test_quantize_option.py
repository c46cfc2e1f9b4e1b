"""The option `attn_quant`: when attention writes quantized output."""

import pytest
import torch

from attn_ops.output_quant.schemes import SCHEMES
from fx_passes import PassConfig
from fx_passes.inductor_slot import AtenPipeline
from fx_passes.passes.quantize_output import QuantizeOutput, why_slower
from tests.fx_passes.passes.quantize_models import SCALE, Behind, given, tensor


@pytest.mark.skipped_when(QuantizeOutput, '`attn_quant` is "auto", and it is on a CPU')
def test_auto_leaves_a_cpu_alone(batch):
    one = QuantizeOutput.of(PassConfig())
    assert one.run(Behind(batch(), given, SCALE).graph) == 0
    assert one.reasons == ["on a CPU the output would be quantized by plain PyTorch"]
    assert one.facts == {}


@pytest.mark.skipped_when(QuantizeOutput, '`attn_quant` is "auto", and a scale')
def test_auto_leaves_a_scale_of_the_batch(batch):
    cuda = torch.device("cuda")
    assert [scheme for scheme in SCHEMES if why_slower(scheme, cuda)] == ["fp8_tensor"]
    assert QuantizeOutput("always").run(Behind(batch(), tensor).graph) == 1


def test_the_option():
    config, rest = PassConfig.split({"attn_quant": "always"})
    assert (config.attn_quant, rest) == ("always", {})
    assert not PassConfig(attn_quant="never").is_on("attn_quant")
    with pytest.raises(ValueError, match="must be 'auto', 'always' or 'never', got True"):
        PassConfig.split({"attn_quant": True})
    with pytest.raises(
        ValueError, match="got 'quantize_output'; supported: attn_quant, batch_invariant"
    ):
        PassConfig.split({"quantize_output": "always"})
    keys = {AtenPipeline(PassConfig(attn_quant=o)).uuid() for o in ("auto", "always", "never")}
    assert len(keys) == 3
