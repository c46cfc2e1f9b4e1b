"""device_constants: numbers that a device needs. `meta` and fake CUDA tensors stand for it."""

import sys

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from fx_passes import attn_ops, recording
from fx_passes.observe import graph_text
from fx_passes.passes import constants
from fx_passes.passes.constants import DeviceConstants

META = torch.zeros(3, 4, device="meta")


def rewritten(function, *args):
    """Texts before and after, the number of matches; the compiled graph has been run."""
    texts, one = [], DeviceConstants()

    def backend(gm, example_inputs):
        texts.append(graph_text(gm.graph))
        texts.append(one.run(gm.graph))
        gm.recompile()
        texts.append(graph_text(gm.graph))
        assert one.run(gm.graph) == 0, "again, it changes nothing"
        assert graph_text(gm.graph) == texts[-1]
        return aot_eager(gm, example_inputs)

    result = torch.compile(function, backend=backend, fullgraph=True)(*args)
    return *texts, result


LEFT = {
    "used on the host": lambda x, h: (h + (n := torch.tensor(3)), x * n.to(x.device)),
    "written on the host": lambda x, h: x * torch.tensor(3.0).add_(1).to(x.device),
    "written and copied": lambda x, h: ((n := torch.tensor(3.0)).add_(1), x * n.to(x.device)),
    "a list": lambda x, h: x * torch.tensor([1.0, 2, 3, 4]).to(x.device),
    "an argument": lambda x, h: x * h.to(x.device),
    "stays on the host": lambda x, h: (x, h * torch.tensor(2.0).to("cpu"), torch.tensor(1)),
}

ON_HOST = pytest.mark.skipped_when(DeviceConstants, "the number is used on the host, too")
NO_NUMBER = pytest.mark.skipped_when(DeviceConstants, "it is a list of numbers, or an argument")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=NO_NUMBER if c in ("a list", "an argument") else ON_HOST) for c in LEFT],
)
def test_skipped(case):
    before, matches, after, _ = rewritten(LEFT[case], META, torch.zeros(()))
    assert (matches, after) == (0, before)


NUMBERS = [
    (0.95, {}, torch.float32),
    (3, {}, torch.int64),
    (True, {}, torch.bool),
    (2, {"dtype": torch.bfloat16}, torch.bfloat16),
    (0.1, {"dtype": torch.bfloat16}, torch.bfloat16),
    (1e39, {}, torch.float32),
    (-1e300, {"dtype": torch.float16}, torch.float16),
    (float("nan"), {}, torch.float32),
]


@pytest.mark.parametrize(("number", "more", "dtype"), NUMBERS)
def test_numbers_that_are_made_for_a_device(number, more, dtype):
    """`torch.tensor(x, device="cuda")` is a copy too. Values are looked at on the host."""
    graph = Graph()
    node = graph.call_function(torch.tensor, (number,), {"device": torch.device("cuda"), **more})
    with FakeTensorMode():
        node.meta["example_value"] = torch.zeros((), device="cuda", dtype=dtype)
    graph.output(node)
    one = DeviceConstants()
    assert one.run(graph) == 1
    assert one.run(graph) == 0
    (full,) = graph.find_nodes(op="call_function", target=torch.full)
    assert full.kwargs == {"dtype": dtype, "device": torch.device("cuda", 0)}
    wanted = torch.tensor(number, **more)
    assert full.args[1] == wanted.item() or number != number, "rounded: Inductor does not round"
    got = torch.full(*full.args, dtype=full.kwargs["dtype"])
    torch.testing.assert_close(got, wanted, atol=0, rtol=0, equal_nan=True)


def test_numbers_by_inductor(monkeypatch):
    """`CPU` taken for a device: what compiled code computes with is what eager code does."""

    def function(x):
        scale = torch.tensor(55.4256, dtype=torch.bfloat16, device=x.device)
        most = torch.tensor(sys.float_info.max, device=x.device)
        tenth = torch.tensor(0.1, dtype=torch.bfloat16, device=x.device)
        return x * scale, torch.minimum(x.float(), most), x == tenth

    monkeypatch.setattr(constants, "CPU", torch.device("meta"))
    x = torch.linspace(-3, 3, 4096).to(torch.bfloat16)
    x[0] = 0.1
    with recording() as recorder:
        compiled = torch.compile(function, backend=attn_ops, fullgraph=True)
        for got, wanted in zip(compiled(x), function(x), strict=True):
            assert torch.equal(got, wanted)
    assert recorder.matches()["device_constants"] == 3


@pytest.mark.skipped_when(DeviceConstants, "the tensor requires grad")
def test_a_tensor_that_requires_grad_stays():
    graph = Graph()
    keywords = {"device": torch.device("cuda"), "requires_grad": True}
    node = graph.call_function(torch.tensor, (1.0,), keywords)
    with FakeTensorMode():
        node.meta["example_value"] = torch.full((), 1.0, device="cuda")
    graph.output(node)
    assert DeviceConstants().run(graph) == 0
