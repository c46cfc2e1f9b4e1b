"""Parameters of layers read, compared and grouped."""

import dataclasses
import types
from typing import Any

import pytest
import torch

from attn_ops import Attention
from attn_ops.metadata import (
    PerLayerParameters,
    get_per_layer_parameters,
    group_layers_by_parameters,
    infer_global_hyperparameters,
)
from tests.attn_ops.metadata.ragged import Ragged, batches, check


class Impl(types.SimpleNamespace):
    """A layer's attention, with any attributes."""


class OtherImpl(Impl):
    """Another kind of it."""


def read_layers(batch: Ragged) -> dict[str, dict[str, Any]]:
    """Up to six layers that often share their parameters."""
    tape = batch.tape
    layers = {}
    for number in range(tape.below(7)):
        own = {"scale": tape.pick([0.125, 0.125, 0.125, 0.25])}
        own |= tape.pick([{}, {}, {"sliding_window": None}, {"sliding_window": (7, 0)}])
        own |= tape.pick([{}, {}, {"logits_soft_cap": None}, {"logits_soft_cap": 30.0}])
        own |= tape.pick([{}, {}, {"sinks": None}, {"sinks": [0.5]}])
        layers[f"model.layers.{number}"] = own
    return layers


def expected_of(own: dict[str, Any]) -> tuple[int, float | None, float, bool]:
    window = own.get("sliding_window")
    left = window[0] if window else -1
    return left, own.get("logits_soft_cap"), own["scale"], own.get("sinks") is not None


@check(batches())
def test_layers_read_compared_and_grouped(batch):
    described = read_layers(batch)
    in_impl = batch.tape.below(2)
    layers = {
        name: types.SimpleNamespace(impl=Impl(**own)) if in_impl else Impl(**own)
        for name, own in described.items()
    }
    names = [name for name in described if batch.tape.below(4) < 3]
    got = get_per_layer_parameters(layers, names, batch.tape.pick([Impl, None]))
    expected = {name: expected_of(described[name]) for name in names}
    assert list(got) == names
    assert {name: dataclasses.astuple(p) for name, p in got.items()} == expected

    groups: list[tuple[tuple, list[str]]] = []
    for name, parameters in expected.items():
        for known, members in groups:
            if known == parameters:
                members.append(name)
                break
        else:
            groups.append((parameters, [name]))
    grouped = group_layers_by_parameters(got)
    assert [(dataclasses.astuple(p), members) for p, members in grouped.items()] == groups

    if len(groups) == 1:
        assert infer_global_hyperparameters(got) == PerLayerParameters(*groups[0][0])
    else:
        with pytest.raises(ValueError, match=groups[1][1][0] if groups else "per_layer_params"):
            infer_global_hyperparameters(got)


@pytest.mark.parametrize(
    ("geometry", "field", "value"),
    [
        ({"soft_cap": 30.0}, "logits_soft_cap", 30.0),
        ({"sliding_window": 5}, "window_left", 4),
        ({"scale": 0.5}, "sm_scale", 0.5),
        ({"sinks": torch.zeros(4)}, "has_sinks", True),
    ],
)
def test_layers_of_our_own(geometry, field, value):
    layers = {"plain": Attention(4, 2, 16), "other": Attention(4, 2, 16, **geometry)}
    got = get_per_layer_parameters(layers, list(layers), Attention)
    assert got["plain"] == PerLayerParameters(-1, None, 0.25, False)
    assert got["other"] == dataclasses.replace(got["plain"], **{field: value})
    shared = getattr(got["plain"], field)
    with pytest.raises(ValueError, match=f"share {field}, got {shared} in 'plain' and {value} in"):
        infer_global_hyperparameters(got)


def test_the_soft_cap_of_a_backend_wins():
    """A layer may have both names: the cap that counts is that by which its backend plans."""
    got = get_per_layer_parameters({"a": Impl(scale=1.0, logits_soft_cap=3.0, soft_cap=7.0)}, ["a"])
    assert got["a"].logits_soft_cap == 3.0


@pytest.mark.parametrize(
    ("names", "cls", "message"),
    [(["a", "missing"], None, "missing"), (["a"], OtherImpl, "'a'"), (["a", "b"], None, "'b'")],
)
def test_layers_that_do_not_fit(names, cls, message):
    """A name that is no layer's, a layer of another type, a layer without a scale."""
    layers = {"a": Impl(scale=1.0), "b": Impl()}
    with pytest.raises(ValueError, match=message):
        get_per_layer_parameters(layers, names, cls)
