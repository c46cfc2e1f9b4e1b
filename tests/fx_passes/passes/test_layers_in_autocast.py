"""outline_layers: layers in an autocast, which cannot be cut out of it."""

import pytest
import torch

from fx_passes import attn_ops, recording
from fx_passes.passes.layers import OutlineLayers
from tests.fx_passes.passes.test_layers import Layer, Stack, X


class Around(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = layer(x).float()
        return x


class Before(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = (x @ x.t()).float() @ x
        return super().forward(x.float())


class Inside(Stack):
    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)


@pytest.mark.skipped_when(OutlineLayers, "autocast begins or ends between its nodes and others")
@pytest.mark.parametrize(("stack", "matches"), [(Around, 0), (Before, 2), (Inside, 0)])
def test_autocast(stack, matches):
    layer = getattr(stack, "Layer", Layer)
    model = stack(layer(), layer())
    with recording() as recorder:
        got = torch.compile(model, backend=attn_ops, fullgraph=True)(X)
    torch.testing.assert_close(got, model(X))
    assert recorder.matches()["outline_layers"] == matches
    if not matches:
        (one,) = (p for p in recorder.passes if p.pass_name == "outline_layers")
        assert set(one.reasons) == {"autocast begins or ends between its nodes and others"}
