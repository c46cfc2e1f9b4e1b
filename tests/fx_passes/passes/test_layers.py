"""outline_layers: equal layers become calls of one subgraph; order is kept, the rest stays."""

import functools

import pytest
import torch
from torch import nn

from fx_passes import attn_ops, recording
from fx_passes.passes.layers import OutlineLayers


class Layer(nn.Module):
    def __init__(self, size: int = 8, factor: float = 2.0) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(size, size), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu() * self.factor


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sin()


def calls_of_layers(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Calls of outlined layers, as a submodule or as a subgraph."""
    subgraph = torch.ops.higher_order.invoke_subgraph
    return [
        n
        for n in gm.graph.nodes
        if n.target is subgraph or (n.op == "call_module" and "layer_" in n.target)
    ]


X = torch.linspace(-1, 1, 24).view(3, 8)


def test_two_kinds_of_layers(dynamo_run):
    model, one = Stack(*(Layer(factor=float(i % 2 + 1)) for i in range(4))), OutlineLayers()
    wanted = model(X)
    gm, got = dynamo_run(model, one, X)
    assert one.matches == 4
    assert {name for name, _ in gm.named_children()} >= {"layer_0", "layer_1"}
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)


def decorated(forward):
    """As Transformers renames keywords: Dynamo's name of the model is that of an argument."""

    @functools.wraps(forward)
    def call(*args, **kwargs):
        return forward(*args, **kwargs)

    return call


class Decorated(Stack):
    forward = decorated(Stack.forward)


class DecoratedSequence(nn.Sequential):
    """Its layers' paths begin with their number, too."""

    forward = decorated(nn.Sequential.forward)


@pytest.mark.parametrize("kind", [Decorated, nn.Sequential, DecoratedSequence])
def test_models_that_dynamo_names_otherwise(dynamo_run, kind):
    model, one = kind(Layer(), Layer(), Layer()).requires_grad_(False), OutlineLayers()
    wanted = model(X)
    gm, got = dynamo_run(model, one, X)
    assert (one.matches, len(calls_of_layers(gm))) == (3, 3)
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)


# -- skipped when ----------------------------------------------------------------------------------


@pytest.mark.skipped_when(OutlineLayers, "fewer than two layers are equal")
@pytest.mark.parametrize(
    "layers",
    [
        (Layer(),),
        (Layer(factor=1.0), Layer(factor=2.0)),
        (Layer(), nn.Sequential(Layer(), nn.ReLU())),
    ],
    ids=["one", "constants", "nodes"],
)
def test_skipped_when_fewer_than_two_are_equal(dynamo_run, layers):
    model, one = Stack(*layers), OutlineLayers()
    wanted = model(X)
    gm, got = dynamo_run(model, one, X)
    assert not calls_of_layers(gm)
    torch.testing.assert_close(got, wanted)
    assert one.matches == 0
    assert any("no other layer is equal" in reason for reason in one.skipped)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


class Interleaved(Stack):
    """What stands between a layer's halves depends on the first; the second needs it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.second(layer.first(x) * 2)
        return x


@pytest.mark.skipped_when(OutlineLayers, "a node outside the layer depends on it")
def test_skipped_when_the_outside_stands_between(dynamo_run):
    model, one = Interleaved(Halves(), Halves()), OutlineLayers()
    wanted = model(X)
    _, got = dynamo_run(model, one, X)
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)
    assert one.matches == 0
    assert sum("depends on it" in reason for reason in one.skipped) == 2


@pytest.mark.skipped_when(OutlineLayers, "training: an input requires grad")
def test_skipped_when_training(dynamo_run):
    model, one = Stack(Layer(), Layer()), OutlineLayers()
    x = X.clone().requires_grad_()
    _gm, got = dynamo_run(model, one, x)
    assert one.matches == 0
    assert one.skipped == ["training: an input requires grad"]
    got.sum().backward()
    (wanted,) = torch.autograd.grad(model(y := X.clone().requires_grad_()).sum(), y)
    torch.testing.assert_close(x.grad, wanted)


def run_dynamic(dynamo_run, model):
    """The pass on a graph of any number of rows, whose result stays equal."""
    wanted = model(X)
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    one = OutlineLayers()
    _, got = dynamo_run(model, one, x)
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)
    return one


@pytest.mark.skipped_when(OutlineLayers, "the layer hands something other than tensors")
def test_skipped_when_a_layer_hands_out_a_number(dynamo_run):
    class Halved(Layer):
        def forward(self, x):
            return super().forward(x), x.shape[0] / 2

    class Model(Stack):
        def forward(self, x):
            for layer in self.layers:
                x, rows = layer(x)
                x = x * rows
            return x

    one = run_dynamic(dynamo_run, Model(Halved(), Halved()))
    assert one.matches == 0
    assert any("something other than a tensor" in reason for reason in one.skipped)


def test_a_size_that_layers_share_is_computed_in_each(dynamo_run):
    """As the number of routed rows in a mixture of experts, which Dynamo computes once."""

    class Counting(Layer):
        def forward(self, x):
            return super().forward(x) + torch.arange(2 * x.shape[0]).view(2, -1).sum(0)[:, None]

    assert run_dynamic(dynamo_run, Stack(Counting(), Counting())).matches == 2


@pytest.mark.skipped_when(OutlineLayers, "the graph reads a number from a tensor")
def test_skipped_when_a_number_has_changed():
    """An operator takes the number as it is: no tensor can stand for it."""

    class Attending(Layer):
        def forward(self, x):
            q = self.linear(x)[None]
            return x + nn.functional.scaled_dot_product_attention(q, q, q, scale=self.factor)[0]

    model = Stack(Attending(), Attending(), Attending())
    compiled = torch.compile(model, backend=attn_ops, fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X))
    for factor in (0.5, 0.25):
        model.layers[0].factor = factor
        with recording() as recorder:
            torch.testing.assert_close(compiled(X), model(X))
        reasons = [r for p in recorder.passes for r in p.skipped if p.pass_name == "outline_layers"]
        if factor == 0.5:
            assert "the graph reads a number from a tensor" in reasons


class Branching(Stack):
    def forward(self, x):
        x = super().forward(x)
        return torch.cond(x.sum() > 0, lambda z: z.sin() + 1, lambda z: z.cos() - 1, (x,))


class Mapped(Layer):
    def forward(self, x):
        return torch.vmap(lambda row: torch.tanh(self.linear(row)))(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(
            Branching(Layer(), Layer(), Layer()),
            "the graph has an operator with code of its own, such as torch.cond",
            marks=pytest.mark.skipped_when(
                OutlineLayers, "an operator of the graph has code of its own"
            ),
            id="cond",
        ),
        pytest.param(
            Stack(Mapped(), Mapped(), Mapped()),
            "layers.0: it is in a vmap",
            marks=pytest.mark.skipped_when(OutlineLayers, "the layer is in a `torch.vmap`"),
            id="vmap",
        ),
    ],
)
def test_skipped_when_nodes_have_code_or_levels(model, reason):
    with recording() as recorder:
        found = torch.compile(model, backend=attn_ops, fullgraph=True)(X)
    torch.testing.assert_close(found, model(X))
    reasons = [r for p in recorder.passes for r in p.skipped if p.pass_name == "outline_layers"]
    assert reason in reasons


# -- hazards ---------------------------------------------------------------------------------------


class MutatesBetween(Stack):
    """The outside writes, between the halves of a layer, to what the second half reads."""

    depends = False

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer.first(x)
            state.add_(h.mean() if self.depends else 1.0)
            x = layer(h, state)
        return x


class ReadsState(Halves):
    def forward(self, h: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.second(h) * state


class ReadsBetween(Stack):
    """The outside reads, between the halves of a layer, what the second half then overwrites."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        total = 0
        for layer in self.layers:
            h = layer.first(x)
            total = total + state * 2
            x = layer(h, state)
        return x + total.mean()


class WritesState(Halves):
    def forward(self, h: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return self.second(h) * state


class DependsBetween(MutatesBetween):
    depends = True


class MutatesOutside(Stack):
    """Writes before, between and after the layers whose results nobody reads."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        for layer in self.layers:
            x = layer(x, state)
            state[0] = 5
            state.mul_(2)
        state[1:3].sub_(x.mean())
        return x


class ReadsWhole(Layer):
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * state


class WritesWhole(Layer):
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.copy_(x.mean(0))
        return super().forward(x) * state


@pytest.mark.skipped_when(OutlineLayers, "a node outside stands between the layer's and writes")
@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        (MutatesBetween, ReadsState),
        (DependsBetween, ReadsState),
        (ReadsBetween, WritesState),
        (MutatesOutside, ReadsWhole),
        (MutatesOutside, WritesWhole),
    ],
    ids=lambda c: c.__name__,
)
def test_order_of_mutations_is_kept(dynamo_run, kind, layer, inductor):
    model = kind(layer(), layer())
    eager, compiled = torch.ones(8), torch.ones(8)
    wanted = model(X, eager)
    if inductor:
        got = torch.compile(model, backend=attn_ops, fullgraph=True)(X, compiled)
    else:
        _, got = dynamo_run(model, one := OutlineLayers(), X, compiled)
        if kind is not MutatesOutside:
            assert (one.matches, len(one.skipped)) == (0, 2)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(got, wanted)


class Reads(Halves):
    def forward(self, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x, linear.weight[:3], 1.0) if x.dtype == torch.bool else linear(x)


class TwoPhases(nn.Module):
    """Every layer reads x before and after it is written."""

    def __init__(self, write) -> None:
        super().__init__()
        self.layers, self.write = nn.ModuleList(Reads() for _ in range(3)), write
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x > 0 if self.write is either else x * 2
        before = [layer(layer.first, x) for layer in self.layers]
        self.write(x)
        return sum(before) + sum(layer(layer.second, x) for layer in self.layers)


def either(x):
    x |= torch.ones_like(x)


WRITES = {
    "inplace": lambda x: nn.functional.relu(x, inplace=True),
    "inplace by place": lambda x: nn.functional.dropout(x, 1.0, True, True),
    "list": lambda x: torch._foreach_mul_([x], 2.0),
    "tuple of out": lambda x: torch.sort(
        x.clone(), 1, out=(x, torch.empty(x.shape, dtype=torch.long))
    ),
    "any overload": lambda x: torch.ops.aten.mul_(x, 3.0),
    "statistics": lambda x: nn.functional.batch_norm(
        torch.ones(4, 3, 8), x[:, 0], torch.ones(3), training=True
    ),
    "max_norm": lambda x: nn.functional.embedding(torch.arange(3), x, max_norm=0.1),
}


@pytest.mark.parametrize("write", [*WRITES.values(), either], ids=[*WRITES, "or"])
def test_every_kind_of_write_is_known(dynamo_run, write):
    model, one = TwoPhases(write), OutlineLayers()
    wanted = model(X)
    _, got = dynamo_run(model, one, X)
    assert (one.matches, len(one.skipped)) == (0, 3)
    torch.testing.assert_close(got, wanted)


class Parts(Stack):
    """Every layer has its state, and another view of the same memory."""

    def __init__(self, part, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.part = part

    def forward(self, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, states[i, :3], self.part(states[i]))
        return x


class WritesPart(Layer):
    def forward(self, x: torch.Tensor, state: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        state.add_(torch.tanh(self.linear(x)))
        return x + part


@pytest.mark.skipped_when(OutlineLayers, "two inputs of the layer overlap in memory")
@pytest.mark.parametrize(("part", "matches"), [(lambda s: s[2], 0), (lambda s: s[3], 2)])
def test_skipped_when_written_inputs_overlap(part, matches):
    """torch takes their places in memory for those of the first layer."""
    model = Parts(part, WritesPart(), WritesPart(), WritesPart())
    eager, compiled = torch.ones(3, 4, 8), torch.ones(3, 4, 8)
    wanted = model(X, eager)
    with recording() as recorder:
        got = torch.compile(model, backend=attn_ops, fullgraph=True)(X, compiled)
    (record,) = (p for p in recorder.passes if p.pass_name == "outline_layers")
    assert record.matches == matches
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(got, wanted)


def test_layers_behind_a_longer_sequence():
    """A piece has the size that its inputs' sizes are made of."""

    class Registers(Stack):
        def forward(self, x):
            x = torch.cat([self.registers, x])
            for layer in self.layers:
                x = layer(x)
            return x[2:]

    model = Registers(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    model.registers = nn.Parameter(torch.ones(2, 8), requires_grad=False)
    run = torch.compile(model, backend=attn_ops, fullgraph=True, dynamic=True)
    for num_rows in (3, 5):
        x = torch.randn(num_rows, 8)
        torch.testing.assert_close(run(x), model(x))


class ReturnsInputView(Layer):
    def forward(self, x):
        return x.view(-1, 8)


class TwoResults(Layer):
    def forward(self, x):
        y = super().forward(x)
        return y + y.t().t().view(-1, 8), y


class Aliases(Stack):
    def forward(self, x):
        kept = []
        for layer in self.layers:
            x, y = layer(x)
            kept.append(y[:1])
        return x.sin(), torch.cat(kept)


class AliasLayer(Layer):
    """Hands out two views of one tensor."""

    def forward(self, x):
        y = super().forward(x)
        return y, y.view(-1, 4)


class InputAlias(Layer):
    """Hands out a view of its input beside its result."""

    def forward(self, x):
        return super().forward(x), x.view(-1, 4)


@pytest.mark.parametrize("layer", [TwoResults, AliasLayer, InputAlias])
def test_results_that_alias(layer):
    model = Aliases(layer(), layer())
    wanted = model(X)
    got = torch.compile(model, backend=attn_ops, fullgraph=True)(X)
    torch.testing.assert_close(got, wanted)


def test_layers_that_return_a_view_of_their_input():
    """Inductor takes a subgraph's result for fresh memory: here it might write to the input."""
    model, x = Stack(ReturnsInputView(), ReturnsInputView()), X.clone()
    wanted = model(X)
    got = torch.compile(model, backend=attn_ops, fullgraph=True)(x)
    assert torch.equal(x, X), "the input was overwritten"
    torch.testing.assert_close(got, wanted)


def test_one_layer_called_twice(dynamo_run):
    shared = Layer()

    class Twice(Stack):
        def forward(self, x):
            return super().forward(super().forward(x))

    model = Twice(shared, Layer())
    wanted = model(X)
    _, got = dynamo_run(model, OutlineLayers(), X)
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)


# -- autocast: layers cannot be cut out of it ------------------------------------------------------


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
