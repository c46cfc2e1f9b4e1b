"""Changes of weights that torch counts, and those that it does not."""

from typing import Any

import pytest
import torch

from graphs.model_changes import WeightVersions


def make_module() -> torch.nn.Module:
    linear: Any = torch.nn.Linear(2, 2)
    linear.k_scale = torch.ones(1)
    linear.register_parameter("other", None)
    module = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(2))
    return module.requires_grad_(False)


CHANGES = {
    "in place": lambda m: m[0].weight.add_(1),
    "copied": lambda m: m[0].weight.copy_(torch.zeros(2, 2)),
    "loaded": lambda m: m.load_state_dict(m.state_dict()),
    "buffer": lambda m: m[1].running_mean.add_(1),
    "attribute": lambda m: m[0].k_scale.mul_(2),
    "another attribute": lambda m: setattr(m[0], "k_scale", torch.ones(1)),
    "another parameter": lambda m: setattr(m[0], "weight", torch.nn.Parameter(torch.ones(2, 2))),
    "None no more": lambda m: setattr(m[0], "other", torch.nn.Parameter(torch.ones(1))),
    "a new buffer": lambda m: m[0].register_buffer("v_scale", torch.ones(1)),
    "no bias": lambda m: setattr(m[0], "bias", None),
    "gone": lambda m: delattr(m[0], "k_scale"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_are_seen(change):
    module = make_module()
    versions = WeightVersions(module)
    assert not versions.changed()
    CHANGES[change](module)
    assert versions.changed()
    versions.remember()
    assert not versions.changed()


@pytest.mark.parametrize("fused", [True, False])
def test_steps_of_optimizers(fused):
    """Torch does not count what fused ones do."""
    module = make_module().requires_grad_(True)
    versions = WeightVersions(module)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    assert not versions.changed()
    optimizer.step()
    assert versions.changed()
    versions.remember()
    assert not versions.changed()


def test_data_is_not_counted():
    module = make_module()
    versions = WeightVersions(module)
    module[0].weight.data.add_(1)
    assert not versions.changed()


def test_tensors_without_a_count_are_refused():
    with torch.inference_mode():
        module = make_module()
    with pytest.raises(ValueError, match=r"^share_prefixes must be False for a model made in "):
        WeightVersions(module)
