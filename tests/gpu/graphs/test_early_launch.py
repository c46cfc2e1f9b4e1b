"""Sessions whose kernels start early: tokens as in turn, and every step verified."""

import gc

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

import fx_passes
from attn_ops.integrations.merged import merge_projections
from graphs import DecodeSession
from tests.gpu.graph_cases import KINDS, PROMPTS, wide
from tests.kit.ptx import faults

pytestmark = pytest.mark.gpu
OPTIONS = {"max_batch_size": 8, "max_tokens": 256, "max_tokens_per_step": 64}
FUSED = {"norm_products": "always", "fused_mlp": "always"}
MERGED = ("llama", "qwen3", "mistral", "phi3")
APART = dict.fromkeys(FUSED, "never")


def session_of(make_model, family="llama", *, options=None, backend="TRITON", heads=4, **more):
    torch._dynamo.reset()
    model = wide(make_model, family, num_attention_heads=heads)
    if family in MERGED:
        merge_projections(model)
    compiled = torch.compile(
        model, backend=fx_passes.attn_ops, fullgraph=True, options=options or {}
    )
    return DecodeSession(compiled, backend=backend, **OPTIONS | more)


def drawn(session, **params):
    return [g.token_ids for g in session.generate(PROMPTS, 24, **params)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3n"])
@pytest.mark.parametrize("backend", ["TRITON", "FLASH_ATTN", "FLASHINFER"])
def test_tokens_are_those_in_turn(make_model, family, backend):
    in_turn = session_of(make_model, family, backend=backend, options={"early_launch": "off"})
    wanted = [drawn(in_turn, seed=3, **kind) for kind in KINDS]
    early = session_of(make_model, family, backend=backend)
    for _ in range(3):
        assert [drawn(early, seed=3, **kind) for kind in KINDS] == wanted
    assert "kernels start" in str(early.report().passes["early_launch"])


@pytest.mark.parametrize("options", [{}, APART, FUSED, {**FUSED, "combo_kernels": True}])
def test_verified_steps(make_model, options):
    """2,000 replays compared with calls, with requests that come and go."""
    session = session_of(make_model, options=options, verify="always")
    seed = 0
    while session.num_steps["captured"] < 2000:
        drawn(session, **KINDS[seed % len(KINDS)], seed=seed)
        seed += 1
    assert session.report().num_recompiles == 0


@pytest.mark.parametrize("options", [{}, FUSED])
@pytest.mark.parametrize("family", MERGED)
def test_fused_products_are_used(make_model, family, options):
    """Second tokens are those of separate kernels; later ones may part where two are nearly equal.

    The first of them is drawn in a replay. Numbers are compared in
    tests/attn_ops/ops/test_fused_products.py.
    """
    plain, fused = (session_of(make_model, family, options=o) for o in (APART, options))
    pairs = zip(drawn(plain), drawn(fused), strict=True)
    same = [a[1] == b[1] for a, b in pairs if a[0] == b[0]]
    matches = fused.compile_record.matches()
    assert matches["fused_mlp"] >= 1
    assert matches["norm_products"] >= 1
    assert sum(same) >= len(PROMPTS) - 2


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_fused_products_where_steps_are_captured(make_model, mode):
    """Called steps of such a session, a prompt here, run them too."""
    session = session_of(make_model, cudagraph_mode=mode)
    session.warm_up()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        session.generate([[7] * 8], 1)
        torch.cuda.synchronize()
    assert session.num_steps["called"] == 1
    captures = mode != "NONE"
    assert any(event.name == "fused_kernel" for event in profile.events()) == captures
    assert session.report().num_recompiles == 0


def test_kernels_of_inductor_wait(make_model):
    """All that this process has compiled for a session: no write, end or start before a wait.

    Of 4 heads and 2 KV heads RoPE and the write are loops of one size, and one kernel anyhow. Of 8
    heads they are combined.
    """
    for heads in (4, 8):
        drawn(session_of(make_model, heads=heads))
    # By `type`: `isinstance` asks proxies of what is gone.
    kernels = [one for one in gc.get_objects() if issubclass(type(one), CachingAutotuner)]
    seen = combos = 0
    for one in kernels:
        for result in getattr(one, "compile_results", []):
            binary = getattr(result, "kernel", None)
            # torch launches kernels without PDL by itself, and keeps no metadata of them.
            if not getattr(getattr(binary, "metadata", None), "launch_pdl", False):
                continue
            pointers = {i: f"p{i}" for i in range(64)}
            wrong = faults(binary.asm["ptx"], pointers, set(pointers.values()))
            if "combo_grid_meta" in one.inductor_meta:
                # A program behind the last of its kernels would do nothing. None is launched.
                wrong = [fault for fault in wrong if "end without" not in fault]
                combos += 1
            assert wrong == [], one.fn.__name__
            seen += 1
    assert seen >= 4
    assert combos >= 1
