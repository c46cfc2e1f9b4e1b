"""What all rows no longer read of a value whose rows are gathered: the inputs of every layer."""

import pytest
import torch
from torch import nn

import fx_passes
from fx_passes import PassConfig
from fx_passes.pipeline import run_dynamo_stage
from tests.fx_passes.passes.fast_prefill_models import (
    KINDS,
    Batches,
    D,
    Layer,
    Yoco,
    call,
    compare,
    compiled,
    seeded,
    write,
)
from tests.kit.marks import long, slow

LAYERS = 5  # the last three see logits rows only


class Inputs(Yoco):
    """Every layer adds an input of its own, which all are computed at the start."""

    def __init__(self, take=lambda v, i: v[:, :, i], make=lambda v: v, change=lambda v: v) -> None:
        super().__init__()
        self.make = make
        self.table = nn.Linear(D, LAYERS * D, bias=False)
        self.take, self.change = take, change

    def run(self, h, kv_caches, batch):
        v = self.make(torch.tanh(self.table(h)).unflatten(-1, (LAYERS, D)) * 0.5)
        for i, layer in enumerate(self.layers):
            if i == 2:
                write(self.shared(h), kv_caches[2], batch)
                v = self.change(v)
            h = layer(h + self.take(v, i), kv_caches[min(i, 2)], batch)
        return h


def graph_of(model):
    """Dynamo's graph behind the pass, and the compiled model."""
    found = []

    def backend(gm, example_inputs):
        run_dynamo_stage(gm, PassConfig(fast_prefill="on", outline_layers=False))
        found.append(gm.graph)
        return gm.forward

    return compiled(model, backend=backend), found[0]


def copies(graph):
    clones = graph.find_nodes(op="call_function", target=torch.clone)
    return [node for node in clones if "memory_format" in node.kwargs]


TAKEN = {
    "by a number": lambda v, i: v[:, :, i],
    "with what follows": lambda v, i: v[:, :, i, :],
    "counted from the end": lambda v, i: v[:, :, i - LAYERS],
    "of the last": lambda v, i: v.transpose(2, 3)[:, :, :, i] if i > 1 else v[:, :, 1 - i],
}


@pytest.mark.parametrize("case", ["with what follows", *slow(*TAKEN)])
def test_what_is_read_is_copied(case):
    """Two of five columns; the value itself is read by the copy and by the gather alone."""
    model = seeded(Inputs(TAKEN[case]))
    fast, graph = graph_of(model)
    (copy,) = copies(graph)
    assert [str(size) for size in copy.meta["example_value"].shape[2:]] == ["2", str(D)]
    (part,) = copy.all_input_nodes
    (source,) = part.all_input_nodes
    rows, other = list(source.users)
    assert other is part
    assert rows.target is torch.index_select
    assert rows.prev is source, "then it can be freed"
    batches = Batches(model)
    for kind in KINDS:
        compare(model, fast, batches.step(kind))


def test_values_are_noted_as_they_are():
    """Strides of what is taken, and behind it, are those of the copy."""
    _, graph = graph_of(seeded(Inputs()))
    (copy,) = copies(graph)
    for user in copy.users:
        strides = [str(stride) for stride in user.meta["example_value"].stride()]
        assert strides[1:] == [str(2 * D), "1"]


def scaled_in_place(v):
    return v.mul_(2.0)


LEFT = {
    "most is read": {"take": lambda v, i: v[:, :, min(3 * i, 4)]},
    "all of it is read": {"take": lambda v, i: v[:, :, i] + 0 * v.sum(2)},
    "a part is read": {"take": lambda v, i: v[:, :, i : i + 1].squeeze(2)},
    "in two dimensions": {"take": lambda v, i: v[:, :, i] * v[:, :, :, 0].sum(-1, keepdim=True)},
    "one node reads it": {"take": lambda v, i: v[:, :, 0] if i == 1 else v[:, :, 4] * (i > 1)},
    "a view of it is read": {
        "take": lambda v, i: v[:, :, i].unsqueeze(0)[0] if i < 2 else v[:, :, i]
    },
    "its memory is read": {
        "take": lambda v, i: (
            v[:, :, i]
            + (torch.as_strided(v[:, :, i], (1, 1, D), (D, D, 1), 2 * D) if i == 1 else 0)
        )
    },
    "it lies in another order": {
        "make": lambda v: v.transpose(2, 3),
        "take": lambda v, i: v[..., i] if i > 1 else v[:, :, :, i] + v[:, :, :, i].sum(-1, True),
    },
    "it is an expanded one": {"make": lambda v: v[:, :, :1].expand(-1, -1, LAYERS, -1)},
    "it is written": {"change": scaled_in_place},
}


@pytest.mark.parametrize("case", ["a part is read", "it is written", *slow(*LEFT)])
def test_left_alone(case):
    model = seeded(Inputs(**LEFT[case]))
    fast, graph = graph_of(model)
    assert copies(graph) == []
    batches = Batches(model)
    for kind in KINDS:
        compare(model, fast, batches.step(kind))


class Parts(Layer):
    """A layer of which two parts are called before the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, y, kv_cache, batch):
        return super().forward(x + y, kv_cache, batch)


class Between(Inputs):
    """What the first two layers read is written between their parts, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0], self.layers[1] = Parts(), Parts()

    def run(self, h, kv_caches, batch):
        v = torch.tanh(self.table(h)).unflatten(-1, (LAYERS, D)) * 0.5
        for i, layer in enumerate(self.layers):
            if i == 2:
                write(self.shared(h), kv_caches[2], batch)
            x = h + v[:, :, i]
            if i < 2:
                view = x.view(1, -1, 4, D // 4)
                first = layer.first(x)
                view.mul_(2.0)
                h = layer(first, layer.second(x), kv_caches[i], batch)
            else:
                h = layer(x, kv_caches[2], batch)
        return h


@pytest.mark.parametrize("outlined", [True, False])
def test_what_shares_memory_still_does(outlined):
    """In the values that are noted: layers are not cut out around a write to what they read."""
    model = seeded(Between())

    def backend(gm, example_inputs):
        config = PassConfig(fast_prefill="on", outline_layers=outlined)
        run_dynamo_stage(gm, config)
        assert len(copies(gm.graph)) == 1
        return gm.forward

    fast, batches = compiled(model, backend=backend), Batches(model)
    for kind in KINDS:
        compare(model, fast, batches.step(kind))


@pytest.mark.parametrize("name", [*slow("gemma4"), *long("gemma3n")])
def test_transformers(make_model, name):
    model = make_model(name)
    _, graph = graph_of(model)
    (copy,) = copies(graph)
    config = model.config
    own = config.num_hidden_layers - config.num_kv_shared_layers
    read = copy.meta["example_value"].shape[2]
    assert read == own - 1, "the last layer with keys and values of its own sees logits rows, too"


@pytest.mark.slow
def test_by_inductor():
    """With layers cut out, whose inputs have other strides now."""
    model = seeded(Inputs())
    options = {"fast_prefill": "on"}
    fast = compiled(model, backend=fx_passes.attn_ops, options=options)
    batches = Batches(model)
    for kind in KINDS:
        compare(model, fast, batches.step(kind), exact=False)
    assert call(fast, batches.step("padded")) is not None
