"""Sessions of models with latent attention: the tokens of Transformers, one graph, little cache.

Most sessions run the passes without Inductor behind them, which compiles for many seconds.
"""

import copy
import itertools
import os
import random

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import fx_passes
from attn_ops import LatentShape
from attn_ops.integrations.transformers import attention_specs
from graphs.app import tables
from graphs.app.parity import Reference, keeping_logits
from tests.kit.compile import graphs_are_compiled_anew
from tests.kit.marks import long, slow
from tests.kit.models import build_model, generated
from tests.kit.sessions import (
    captured,
    chunked,
    drafted,
    make_session,
    poisoned,
    refuses,
    tokens_of,
)
from tests.scenarios.test_families import assert_outputs_vary, check_random_batches
from tests.scenarios.test_fast_prefill import MODES, eager

FAMILIES = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "youtu", "minicpm3"]
SHAPE = LatentShape(16, 16, 8, 12)
PROMPTS = [[3], [5, 9], list(range(1, 40)), [1, 2, 3, 4]]


def expected(model, num_tokens: int = 12) -> list[list[int]]:
    reference = Reference(model)
    return [reference.generate(prompt, num_tokens)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", [*FAMILIES[:2], *slow(*FAMILIES[2:])])
def test_random_batches_equal_transformers(family):
    model = build_model(family, tie_word_embeddings=False)
    names = list(model.state_dict())
    _, outputs = check_random_batches(model, model, 10, family)
    assert_outputs_vary(outputs)
    assert list(model.state_dict()) == names
    assert attention_specs(model)[0].latent == SHAPE


@pytest.mark.parametrize("family", slow("deepseek_v2", "deepseek_v3", "minicpm3"))
def test_the_passes_change_no_token(family, num_graphs):
    """One graph in all modes: called, decode steps captured, and mixed ones, whole and in pieces.

    On a CPU a graph runs the Python of its step again.
    """
    model, before = build_model(family), num_graphs()
    wanted = expected(model)
    fast = torch.compile(model, backend=eager, fullgraph=True)
    for mode in MODES.values():
        session = poisoned(chunked(fast, **mode))
        assert tokens_of(session.generate(PROMPTS, 12)) == wanted
        assert session.counters.num_recompiles == 0
    assert num_graphs() - before == 1


@pytest.mark.parametrize(
    ("family", "fast_prefill"),
    [
        *slow(("deepseek_v3", "auto")),
        *long(("deepseek_v2", "off"), ("deepseek_v2", "auto"), ("deepseek_v3", "off")),
        *long(*itertools.product(FAMILIES[2:], ["off", "auto"])),
    ],
)
def test_random_batches_by_inductor(family, fast_prefill, num_graphs):
    model, before = build_model(family, num_layers=3), num_graphs()
    run = torch.compile(
        model,
        backend=fx_passes.attn_ops,
        fullgraph=True,
        options={"fast_prefill": fast_prefill},
    )
    check_random_batches(model, run, 12, family)
    assert num_graphs() - before == 1


def test_fast_prefill_leaves_rows_out_of_the_last_attention():
    """Where a layer has experts, they sort the rows of the batch, so all are computed."""
    model = build_model("minicpm3")
    with fx_passes.recording() as recorder:
        session = chunked(torch.compile(model, backend=eager, fullgraph=True))
        assert tokens_of(session.generate(PROMPTS, 12)) == expected(model)
    (summary,) = (p.summary for p in recorder.passes if p.pass_name == "fast_prefill")
    assert "1 of 2 attentions for logits rows only" in str(summary)


@pytest.mark.parametrize("family", [*slow("deepseek_v2"), *long("deepseek_v3")])
def test_the_kernel_of_norm_and_rope_writes_the_cache(family):
    """No key or value of all heads is computed, and no complex number stands in a layer."""
    model = build_model(family, num_layers=1)
    session = make_session(torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True))
    with graphs_are_compiled_anew():
        _, codes = run_and_get_code(session.generate, [[5, 9, 3]], 3)
    assert session.counters.num_recompiles == 0, "a step of one token is no graph of its own"
    lines = [line for code in codes for line in code.splitlines()]
    (writing,) = (one for one in lines if "index_put" in one and "= async_compile" in one)
    assert "rsqrt" in writing
    assert ("stack" if family == "deepseek_v2" else "cat") in writing
    products = sum("extern_kernels.mm(" in line for line in lines)
    assert products == 8, "two of q, one of the latent, one behind attention, MLP, head"
    assert sum("mla_attention.default(" in line for line in lines) == 1


@pytest.mark.parametrize("options", [{}, {"decode_steps": 8, "verify": "always"}])
def test_captured_steps(options):
    model = build_model("deepseek_v3")
    session = poisoned(captured(model, **options))
    assert tokens_of(session.generate(PROMPTS, 12)) == expected(model)
    assert session.num_steps["called"] == 0
    assert "TORCH_MLA" in str(session.report())


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton on a CPU")
@pytest.mark.parametrize("options", [{"verify": "always"}, *slow({"decode_steps": 8})])
def test_captured_steps_by_triton(options):
    """Decodes attend over latents, prompts of 16 tokens over expanded keys."""
    model = build_model("deepseek_v3", num_layers=1)
    options |= {"backend": "TRITON_MLA", "block_size": 16, "cudagraph_mode": "FULL_DECODE_ONLY"}
    session = poisoned(captured(model, **options))
    assert tokens_of(session.generate(PROMPTS, 6)) == expected(model, 6)
    assert session.num_steps["called"] == 1


@pytest.mark.parametrize("options", [{"debug": "eager_replay"}, {"cudagraph_mode": "NONE"}])
def test_drafts(options):
    """Right ones and wrong ones."""
    model, numbers = build_model("deepseek_v3"), random.Random(0)
    session = poisoned(make_session(model, num_draft_tokens=3, **options))

    def propose(following):
        return [t if numbers.random() < 0.8 else (t + 1) % 64 for t in following[:3]]

    results, num_calls = drafted(session, PROMPTS, wanted := expected(model), propose)
    assert num_calls < 11, "drafts were accepted"
    assert tokens_of(results) == wanted


# -- FP8 caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_caches(kv_cache_dtype):
    """Logits are close, by the spread of a row; a wrong scale or slot moves them by all of it."""
    model, rows = build_model("deepseek_v3"), {}
    for dtype in ("auto", kv_cache_dtype):
        session = poisoned(chunked(model, kv_cache_dtype=dtype))
        with keeping_logits(session) as logits:
            session.generate(PROMPTS, 1)
        rows[dtype] = torch.stack([r[0] for _, r in sorted(logits.items())])
    assert session.cache.tensors[0].dtype == torch.uint8
    shift = (rows[kv_cache_dtype] - rows["auto"]).abs().mean() / rows["auto"].std()
    assert 1e-4 < shift < {"fp8_e4m3": 0.25, "fp8_e5m2": 0.5}[kv_cache_dtype]


def test_the_scale_of_an_fp8_cache():
    """With a scale of its own, latents far beyond FP8's range are kept."""
    model = build_model("deepseek_v3")
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.kv_a_layernorm.weight.data *= 1000
        attention.kv_b_proj.weight.data /= 1000
        attention.register_buffer("kv_scale", torch.tensor([8.0]))
    with keeping_logits(session := poisoned(chunked(model))) as wanted:
        session.generate(PROMPTS, 1)
    with keeping_logits(session := poisoned(chunked(model, kv_cache_dtype="fp8_e4m3"))) as got:
        session.generate(PROMPTS, 1)
    pairs = [(wanted[i][0], got[i][0]) for i in wanted]
    assert max(float((a - b).abs().mean() / a.std()) for a, b in pairs) < 0.3


# -- the cache -------------------------------------------------------------------------------------


def test_a_copy_and_other_implementations_attend_by_themselves():
    model = build_model("deepseek_v2")
    wanted = expected(model)
    make_session(model)
    twin = copy.deepcopy(model)
    assert twin.model.layers[0].self_attn.expand_kv.__self__ is twin.model.layers[0].self_attn
    assert tokens_of(make_session(twin).generate(PROMPTS, 12)) == wanted
    for implementation in ("sdpa", "eager"):
        assert generated(twin, PROMPTS[3], 12, implementation, do_sample=False) == wanted[3]


# -- refusals --------------------------------------------------------------------------------------


def changed(**attributes):
    model = build_model("deepseek_v3")
    for name, value in attributes.items():
        setattr(model.model.layers[0].self_attn, name, value)
    return model


def test_layers_that_the_operators_do_not_compute():
    refuses(changed(indexer=nn.Identity()), "must attend to all keys, got DeepseekV3Attention, wh")
    refuses(changed(is_kv_shared_layer=True, kv_shared_layer_index=1), "caches of their own")
    refuses(changed(sliding_window=4), "must have no sliding_window, got DeepseekV3Attention")
    refuses(changed(kv_b_proj=nn.Linear(16, 112)), "kv_b_proj of DeepseekV3Attention must have no")
    refuses(changed(v_head_dim=11), r"kv_b_proj.weight .* must have shape \[108, 16\], got \[112,")


@pytest.mark.parametrize("what", ["keys", "values", "rotated"])
def test_keys_and_values_that_attention_would_not_make(what):
    """A subclass that does more with them than `kv_b_proj`."""
    model = build_model("deepseek_v3")
    layer = model.model.layers[1].self_attn

    class Changed(type(layer)):
        def expand_kv(self, kv_nope, k_rot):
            key, value = super().expand_kv(kv_nope, k_rot)
            if what == "rotated":
                key[..., -1] *= torch.arange(key.shape[1])[None, :, None]
            return (key * (1.1 if what == "keys" else 1), value * (1.1 if what == "values" else 1))

    layer.__class__ = Changed
    message = "(keys|values) of model.layers.1.self_attn must be those that kv_b_proj makes of its"
    refuses(model, message)


def test_a_layer_that_was_not_prepared():
    model = build_model("deepseek_v3")
    session = make_session(model)
    del model.model.layers[0].self_attn.expand_kv
    with pytest.raises(ValueError, match=r"must be prepared by attention_specs\(model\)"):
        session.generate(PROMPTS, 2)


def test_the_workspace_has_room_by_the_rule():
    """8 requests of full length; it takes no memory before a prompt needs it."""
    session = make_session(build_model("deepseek_v2"), max_tokens=64, max_batch_size=4)
    workspace = session.builder.workspace
    assert workspace.num_tokens == 8 * 64
    assert workspace.tensor.shape == (512, SHAPE.cache_width)
    wanted = workspace.num_bytes + workspace.up_projected_bytes
    assert tables._workspace_bytes(session) == wanted
    assert tables._workspace_bytes(make_session(build_model("llama"))) == 0
