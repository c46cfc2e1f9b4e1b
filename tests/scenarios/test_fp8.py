"""Sessions whose KV caches hold FP8: how close they come, what they take, and that nothing copies.

P blocks, B block size, K kv heads, H head size.
"""

import math
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import fx_passes
from attn_ops import Attention, LatentShape, MLAAttention, PagedKVCache, get_backend
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.integrations import transformers as integration
from graphs import DecodeSession, Verifier
from graphs.app.parity import keeping_logits
from tests.kit.compile import check_no_copies, graphs_are_compiled_anew
from tests.kit.marks import long, slow

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PROMPTS = [[3], [5, 9], list(range(17)), list(range(40, 0, -1))]
NAN = 0x7F  # a NaN in both formats
# A stored number is off by at most half a step: 2**-4 of it with 3 bits of mantissa, 2**-3 with 2.
ROUNDING = {"fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}


def make_session(model, kv_cache_dtype: str, **options) -> DecodeSession:
    defaults: dict[str, Any] = {
        "max_batch_size": 4,
        "max_tokens": 64,
        "max_tokens_per_step": 16,
        "block_size": 4,
    }
    session = DecodeSession(model, kv_cache_dtype=kv_cache_dtype, **(defaults | options))
    for cache in session.cache.tensors:
        cache[1:] = NAN if cache.dtype == torch.uint8 else float("nan")
    return session


@pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_cache_dtype", FP8)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_logits_stay_close(make_model, kv_cache_dtype, compiled, cache_layout):
    """The mean shift is below four roundings of the logits' spread.

    A score of spread s moves by about rounding * s, and a value by rounding of itself, in each of
    two layers. The scores of these models spread over several units, so a softmax moves by more
    than one rounding; a wrong format, scale or slot moves it by the whole spread.
    """
    model = make_model("llama")
    rows = {}
    for dtype in ("auto", kv_cache_dtype):
        run = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
        session = make_session(run if compiled else model, dtype, cache_layout=cache_layout)
        with keeping_logits(session) as logits:
            session.generate(PROMPTS, 1)
        rows[dtype] = torch.stack([r[0] for _, r in sorted(logits.items())])
    wanted, got = rows["auto"], rows[kv_cache_dtype]
    shift = (got - wanted).abs() / wanted.std()
    assert 1e-4 < shift.mean() < 4 * ROUNDING[kv_cache_dtype]
    if compiled:
        counters = session.counters
        assert (counters.num_graphs, counters.num_breaks, counters.num_recompiles) == (1, 0, 0)


BAD_SCALES = [
    (torch.tensor([0.0]), "finite and above 0, got 0.0"),
    (torch.tensor([math.nan]), "finite and above 0, got nan"),
    (torch.tensor([math.inf]), "finite and above 0, got inf"),
    (torch.tensor([-0.5]), "finite and above 0, got -0.5"),
    (0.5, r"a tensor of shape \[1\] or None, got 0.5"),
    (torch.tensor([1.0, 2.0]), r"torch.float32 of shape \[1\], got torch.float32 \[2\]"),
    (torch.tensor([1.0]).half(), r"torch.float32 of shape \[1\], got torch.float16 \[1\]"),
    (torch.ones(1, device="meta"), "on cpu, got meta"),
]


@pytest.mark.parametrize(("scale", "message"), BAD_SCALES, ids=str)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_bad_scales_are_refused_when_the_session_is_made(model, name, scale, message):
    layer = model.model.layers[1].self_attn
    setattr(layer, name, scale)
    try:
        make_session(model, "auto")  # without FP8 no scale is read
        with pytest.raises(ValueError, match=f"{name} of layer 1 must be {message}"):
            make_session(model, "fp8_e4m3")
    finally:
        delattr(layer, name)


@pytest.mark.parametrize(("scale", "message"), BAD_SCALES[:4], ids=str)
def test_bad_scales_of_own_layers_are_refused_with_their_spec(scale, message):
    latent = LatentShape(kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    for layer, name in ((Attention(4, 2, 16), "v_scale"), (MLAAttention(3, latent), "kv_scale")):
        setattr(layer, name, scale)
        layer.spec(torch.float32)
        with pytest.raises(ValueError, match=f"{name} must be {message}"):
            layer.spec(torch.float32, "fp8_e4m3")


@pytest.mark.parametrize(
    ("family", "path"),
    [("llama", "kv_scale"), ("llama", "k_proj.k_scale"), ("deepseek_v2", "v_scale")],
)
def test_scales_by_other_names_do_not_pass_unused(make_model, family, path):
    model = make_model(family)
    part, _, name = path.rpartition(".")
    layer = model.model.layers[1].self_attn.get_submodule(part)
    setattr(layer, name, torch.tensor([0.5]))
    make_session(model, "auto")
    with pytest.raises(ValueError, match=rf"^{path} of layer 1 must be None, got .*; supported"):
        make_session(model, "fp8_e4m3")


def test_caches_take_half_the_bytes(make_model):
    model = make_model("llama").to(torch.bfloat16)
    plain, narrow = (make_session(model, dtype) for dtype in ("auto", "fp8_e4m3"))
    assert {cache.dtype for cache in narrow.cache.tensors} == {torch.uint8}
    assert narrow.cache.num_bytes * 2 == plain.cache.num_bytes
    assert sum(c.nbytes for c in narrow.cache.tensors) == narrow.cache.num_bytes
    (result,) = narrow.generate([[5, 9]], 4)
    assert len(result.token_ids) == 4
    verified = make_session(model, "fp8", verify=Verifier("first", kv_cache_dtype="fp8_e4m3"))
    assert verified.generate([[5, 9]], 4)[0].token_ids == result.token_ids


def test_unknown_dtypes_and_layouts_are_refused(make_model):
    model = make_model("llama")
    with pytest.raises(ValueError, match="kv_cache_dtype must be known, got 'fp8_e3m4'; supported"):
        make_session(model, "fp8_e3m4")
    with pytest.raises(ValueError, match="cache_layout"):
        make_session(model, "auto", cache_layout="DNH")


@pytest.mark.parametrize("kv_cache_dtype", FP8)
def test_scales_of_the_modules_are_used(make_model, make_prompts, kv_cache_dtype):
    """The first layer: keys and values divided and rounded; multiplied again by the reference."""
    model = make_model("llama")
    layer = model.model.layers[0].self_attn
    for name, scale in (("k_scale", 0.03), ("v_scale", 0.5)):
        layer.register_buffer(name, torch.tensor([scale]))
    lengths, caught = [5, 13], {}
    prompts = make_prompts(model, lengths)
    specs = integration.attention_specs(model, kv_cache_dtype)
    backend = get_backend("TORCH")
    builder = backend.builder(backend, specs, 4, "cpu")
    cache = PagedKVCache(specs, num_tokens=128, block_size=4)
    keywords = prompts.keywords | {
        "kv_caches": cache.tensors,
        "kv_cache_dtype": kv_cache_dtype,
        "attn_metadata": builder.build(0, prompts.keywords["attn_metadata"].common),
    }
    spied = integration.attention_forward

    def spy(module, query, key, value, *args, **kwargs):
        out = spied(module, query, key, value, *args, **kwargs)
        caught.setdefault(module.layer_idx, (query[0], key[0], value[0], out[0][0]))
        return out

    from transformers import AttentionInterface

    AttentionInterface.register(integration.NAME, spy)
    try:
        model(**keywords)
    finally:
        integration.register()
    q_NTH, k_KTH, v_KTH, out_TNH = caught[0]
    fp8, slots = FP8[kv_cache_dtype], prompts.keywords["slot_mapping"]
    stored = cache.tensors[0].view(fp8)[slots // 4, :, slots % 4].float()
    for i, (x, scale) in enumerate(((k_KTH, 0.03), (v_KTH, 0.5))):
        most = torch.finfo(fp8).max
        rounded = (x / scale).clamp(-most, most).to(fp8).float()
        torch.testing.assert_close(stored[:, i], rounded.transpose(0, 1))
    common = keywords["attn_metadata"].common
    asked = {"kv_cache_dtype": kv_cache_dtype, "k_scale": layer.k_scale, "v_scale": layer.v_scale}
    q_TNH = q_NTH.transpose(0, 1)
    wanted = reference_attention(q_TNH, cache.tensors[0], common, 16**-0.5, **asked)
    torch.testing.assert_close(out_TNH.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_scales_reach_a_compiled_session(make_model):
    """A scale that is far too large loses the keys; the same one in eager gives the same tokens."""
    model = make_model("llama")
    outputs = []
    for scale in (None, 0.05, 200.0):
        for layer in model.model.layers:
            if scale is not None:
                layer.self_attn.k_scale = torch.tensor([scale])
        torch._dynamo.reset()
        run = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
        got = [make_session(m, "fp8_e4m3").generate(PROMPTS, 8) for m in (model, run)]
        assert got[0] == got[1]
        outputs.append([r.token_ids for r in got[0]])
    assert outputs[2] not in outputs[:2]


@pytest.mark.parametrize("kv_cache_dtype", [*slow("fp8_e5m2"), *long("fp8_e4m3")])
def test_no_copy_of_a_cache(make_model, kv_cache_dtype):
    """No tensor and no loop of the cache's size in Inductor's code."""
    model = make_model("llama")
    run = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = make_session(run, kv_cache_dtype)
    addresses = [t.data_ptr() for t in session.cache.tensors]
    with graphs_are_compiled_anew():
        _, code = run_and_get_code(lambda: session.generate(PROMPTS, 2))
    assert [t.data_ptr() for t in session.cache.tensors] == addresses
    check_no_copies(code, session.cache.tensors[0].shape)
