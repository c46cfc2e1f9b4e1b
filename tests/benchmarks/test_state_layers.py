"""The benchmark of layers with a state runs; on a CPU its figures mean nothing."""

import json

import pytest
import torch

from benchmarks import state_layers


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["it", "--device", "cpu", "--json", str(path)])
    state_layers.main()
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 4 * len(state_layers.LAYERS)
    assert result["command"].startswith("python -m benchmarks.state_layers ")


@pytest.mark.parametrize("name", state_layers.LAYERS)
def test_bytes_of_a_step(name):
    """States are most of them, and counted twice; copies have memory of their own."""
    layer = state_layers.LAYERS[name](3, 3, "cpu", torch.bfloat16, **state_layers.TINY[name])
    states = layer.states[1:]
    assert layer.num_bytes > 2 * states.numel() * states.element_size()
    other, before = layer.moved(), layer.states.clone()
    out = other.run(*state_layers.decodes(3, "cpu"))
    assert out.isfinite().all()
    assert torch.equal(layer.states, before)
    assert not torch.equal(other.states, before)
