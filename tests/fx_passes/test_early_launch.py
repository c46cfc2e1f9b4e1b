"""The option `early_launch`: what is decided, what Inductor writes, what stays as it was."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config

from attn_ops.early_launch import is_in_turn
from fx_passes import PassConfig, early_launch, recording
from fx_passes.early_launch import OPTION, early_launch_of

ROOT = Path(__file__).parents[2]
X = [torch.zeros(2)]


def decided(reason=None, given=None, inputs=X, **config):
    """The decision on a CPU that passes for a GPU which lacks `reason`."""
    with mock.patch.object(early_launch, "why_not_early", return_value=reason):
        return early_launch_of(PassConfig(**config), given or {}, inputs)


def test_on_where_the_gpu_can():
    assert decided().patches == {OPTION: True}
    assert decided(early_launch="on").early
    assert not decided("an old GPU").early
    assert decided("an old GPU").patches == {}
    assert not decided(inputs=[3]).early


def test_on_where_the_gpu_cannot():
    with pytest.raises(ValueError, match="must be 'auto' or 'off' here, got 'on' for an old GPU"):
        decided("an old GPU", early_launch="on")


def test_off():
    """Kernels of ours that are called are launched in turn as well."""
    found = decided(early_launch="off")
    assert (found.early, found.patches) == (False, {OPTION: False})
    assert found.called(lambda x: (x, is_in_turn()))(3) == (3, True)
    assert not is_in_turn()
    assert decided().called(is_in_turn) is is_in_turn


def test_the_users_option_decides():
    """Kernels are mended all the same if they are launched early."""
    assert (decided(given={OPTION: True}).early, decided(given={OPTION: True}).patches) == (
        True,
        {},
    )
    assert not decided(given={OPTION: False}).early


def test_on_a_cpu():
    """Nothing is said where nothing was asked, and no option of the user's is changed."""
    before = inductor_config.get_config_copy()
    with recording() as recorder:
        compiled = torch.compile(lambda x: x + 1, backend="attn_ops")
        assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert recorder.summaries() == {}
    options = {"early_launch": "off"}
    with recording() as recorder:
        compiled = torch.compile(lambda x: x + 2, backend="attn_ops", options=options)
        assert compiled(torch.ones(3)).tolist() == [3, 3, 3]
    assert recorder.summaries() == {"early_launch": "off: kernels are launched in turn"}
    assert inductor_config.get_config_copy() == before


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_what_inductor_writes():
    """A kernel that reads nothing does not wait, unless it is mended; no other fault is known."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.fx_passes.inductor_kernels"]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found["mended"]) >= 8
    assert [name for name, wrong in found["mended"].items() if wrong] == []
    assert any("it may end without waiting" in wrong for wrong in found["plain"].values())
