"""Which kernels are launched early, and the switch."""

from unittest import mock

import pytest
import torch

from attn_ops.early_launch import launched_in_turn, why_not_early
from attn_ops.early_launch.triton import launch


def test_not_on_a_cpu():
    assert "only CUDA" in why_not_early(torch.device("cpu"))
    assert launch.early_launch(torch.device("cpu")) == {"PDL": False}


@pytest.mark.parametrize(
    ("capability", "reason"), [((8, 9), "8.9"), ((9, 0), None), ((10, 0), None)]
)
def test_from_hopper_on(capability, reason):
    why_not_early.cache_clear()
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        found = why_not_early(torch.device("cuda", 0))
    why_not_early.cache_clear()
    assert found is None if reason is None else reason in found


def test_in_turn():
    """Inside the block, and in nested ones; not behind it."""
    with mock.patch.object(launch, "_launches_early", return_value=True):
        device = torch.device("cuda", 0)
        assert launch.early_launch(device) == {"PDL": True, "launch_pdl": True}
        with launched_in_turn(), launched_in_turn():
            assert launch.early_launch(device) == {"PDL": False}
        assert launch.early_launch(device)["PDL"]
