"""Changes of weights that torch counts, and those that it does not."""

from typing import Any

import pytest
import torch

from graphs.requests.weight_versions import WeightVersions


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


UNCOUNTED = {
    "all of it": lambda m: m[0].weight.data.add_(1),
    "a bias": lambda m: m[0].bias.data.copy_(torch.ones(2)),
    "NaN": lambda m: m[0].weight.data.fill_(torch.nan),
    "a scale": lambda m: m[0].k_scale.data.fill_(3.0),
    "a buffer": lambda m: m[1].running_mean.data.add_(1),
    "a count": lambda m: m[1].num_batches_tracked.data.add_(1),
    "a weight of 8 bits": lambda m: m[2].data.view(torch.uint8).add_(1),
    "a part of a tensor": lambda m: m[3].data.zero_(),
}


@pytest.mark.parametrize("change", UNCOUNTED)
def test_values_tell_what_torch_does_not_count(change):
    module = make_module()
    eight = torch.ones(3, 40).to(torch.float8_e4m3fn)
    part = torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1)[1:, 1:]
    for name, value in (("2", eight), ("3", part)):
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    parts = [module[0], module[1], *module._parameters.values()]
    versions = WeightVersions(module)
    assert not versions.changed(values_too=True)
    UNCOUNTED[change](parts)
    assert not versions.changed()
    assert versions.changed(values_too=True)
    versions.remember()
    assert not versions.changed(values_too=True)


def test_tensors_without_a_count_are_refused():
    with torch.inference_mode():
        module = make_module()
    with pytest.raises(ValueError, match=r"^share_prefixes must be False for a model made in "):
        WeightVersions(module)
