"""Kernels of captures are compiled before them, side by side."""

import collections
import sys

import pytest
import torch
import triton

from attn_ops.early_launch.triton import launch
from attn_ops.early_launch.triton.launch import rehearsal
from attn_ops.ops.triton.rows import launch_rms_norm
from graphs import DecodeSession
from tests.gpu.test_session import VOCAB, compiled_whole, tiny_llama

pytestmark = pytest.mark.gpu


@pytest.fixture
def compilations(monkeypatch):
    """Names of kernels, as they are compiled or loaded by Triton: anew, whatever ran before."""
    names = []
    monkeypatch.setattr(launch, "_COMPILED", {})
    modules = [m for name, m in sys.modules.items() if name.startswith(("attn_ops.", "graphs."))]
    for kernel in {id(k): k for m in modules for k in vars(m).values()}.values():
        if isinstance(kernel, triton.JITFunction):
            fresh = collections.defaultdict(kernel.create_binder)
            monkeypatch.setattr(kernel, "device_caches", fresh)

    def note(*, fn, **_):
        names.append(f"{fn.module}.{fn.name}")

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return names


def test_captures_compile_nothing(compilations, monkeypatch):
    """And every replay leaves what a call of its step does."""
    torch._dynamo.reset()
    model = compiled_whole(tiny_llama())
    session = DecodeSession(
        model, max_batch_size=8, max_tokens=256, max_tokens_per_step=128, verify="always",
        mixed_capture_sizes=[16, 64, 128],
    )  # fmt: skip
    seen: list[list[str]] = []
    capture = session.graphs._capture

    def noted(*args):
        before = len(compilations)
        try:
            return capture(*args)
        finally:
            seen.append(compilations[before:])

    monkeypatch.setattr(session.graphs, "_capture", noted)
    session.warm_up()
    assert compilations
    assert len(seen) > 3
    assert not [name for names in seen for name in names if name.startswith(("attn_ops", "graphs"))]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (1, 20, 100)]
    session.generate(prompts, max_new_tokens=8)
    assert session.num_steps["captured"]


def test_nothing_is_launched_in_a_rehearsal(compilations):
    x, w = torch.randn(4, 96, device="cuda"), torch.randn(96, device="cuda")
    with rehearsal():
        launch_rms_norm(x, None, w, 1e-5)
    assert len(compilations) == 1
    expected = torch.nn.functional.rms_norm(x, (96,), w, 1e-5)
    torch.testing.assert_close(launch_rms_norm(x, None, w, 1e-5)[1], expected)
    assert len(compilations) == 1
