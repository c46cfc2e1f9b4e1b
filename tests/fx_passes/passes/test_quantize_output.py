"""quantize_output: forms that are recognised give the same bits."""

import random

import pytest
import torch

from attn_ops import LatentShape
from attn_ops.block_layout import BlocksparseParams, BlockTables, local_strided
from attn_ops.block_layout.tables import layout_arguments
from attn_ops.output_quant.schemes import SCHEMES
from fx_passes import PassConfig
from fx_passes.analysis.quantize_forms import FORMS
from fx_passes.analysis.quantize_scales import _Numbers
from fx_passes.inductor_slot import AtenPipeline
from fx_passes.passes.quantize_output import QuantizeOutput, why_slower
from tests.fx_passes.passes.quantize_models import (
    MAX,
    SCALE,
    Behind,
    act_quant,
    by_max,
    by_norm,
    fake_quantized,
    given,
    group,
    inverse,
    powers_of_two,
    quantized,
    random_form,
    row,
    tensor,
    times_inverse,
)
from tests.kit.latent import build_latent_batch

HALF = SCALE.to(torch.bfloat16)
F32 = torch.float32


def operator_of(graph):
    target = torch.ops.attn_ops.attention_quant.default
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def options_of(graph) -> dict:
    return {k: v for k, v in operator_of(graph).kwargs.items() if k != "out_scale"}


def rewritten(behind: Behind) -> QuantizeOutput:
    """Apply the pass: one match, the same bits, and nothing to do for a second run."""
    wanted, one = behind.run(), QuantizeOutput("always")
    assert one.run(behind.graph) == 1, one.skipped
    assert all(torch.equal(a, b) for a, b in zip(behind.run(), wanted, strict=True))
    assert not behind.graph.find_nodes(
        op="call_function", target=torch.ops.attn_ops.attention.default
    )
    again = QuantizeOutput("always")
    assert (again.run(behind.graph), again.skipped) == (0, [])
    return one


def amax(x):
    return x.abs().amax(-1, keepdim=True)


ROUND = {"round_scale": True}


def half(number: float) -> float:
    return float(torch.tensor(number).bfloat16())


def single(number: float) -> float:
    return float(torch.tensor(number))


RECOGNISED = {
    "torchao PerRow": (row, (), {"scheme": "fp8_row", **ROUND}),
    "with a floor": (
        lambda x: row(x, 0.3), (),
        {"scheme": "fp8_row", "min_scale": half(half(0.3) / MAX), **ROUND},
    ),
    "in float32": (
        lambda x: row(x, 0.5, F32), (), {"scheme": "fp8_row", "min_scale": single(0.5 / MAX)},
    ),
    "with a least scale": (
        lambda x: row(x, least=1e-3), (), {"scheme": "fp8_row", "min_scale": half(1e-3), **ROUND},
    ),
    "with a floor that is a tensor": (
        lambda x: quantized(x, amax(x).clamp(min=torch.full((1,), 0.3)) / MAX), (),
        {"scheme": "fp8_row", "min_scale": single(single(0.3) / MAX)},
    ),
    "with a least scale of float32": (
        lambda x: quantized(x, (amax(x) / MAX).float().clamp(min=1e-3)), (),
        {"scheme": "fp8_row", "min_scale": single(1e-3), **ROUND},
    ),
    "by a tensor of 448": (
        lambda x: quantized(x, amax(x) / torch.full((1,), MAX)), (),
        {"scheme": "fp8_row"},
    ),
    "by a norm": (by_norm, (), {"scheme": "fp8_row", "round_values": True}),
    "torchao PerTensor": (tensor, (), {"scheme": "fp8_tensor", **ROUND}),
    "by max": (by_max, (), {"scheme": "fp8_tensor"}),
    "torchao PerBlock": (group, (), {"scheme": "fp8_group128", **ROUND}),
    "groups of 64": (lambda x: group(x, 64), (), {"scheme": "fp8_group64", **ROUND}),
    "act_quant": (act_quant, (), {"scheme": "fp8_group128"}),
    "UE8M0": (
        powers_of_two, (),
        {"scheme": "fp8_group128", "min_scale": single(single(1e-4) / MAX), "ue8m0": True},
    ),
    "a batch by its inverse": (
        lambda x: times_inverse(x, None), (), {"scheme": "fp8_tensor", "multiply": True},
    ),
    "times 1 / scale": (times_inverse, (), {"scheme": "fp8_row", "multiply": True}),
    "given": (given, (SCALE,), {"scheme": "fp8_static"}),
    "given in bfloat16": (given, (HALF,), {"scheme": "fp8_static", "round_values": True}),
    "given, of no dimension": (given, (HALF[0],), {"scheme": "fp8_static", "round_values": True}),
    "1 / given": (inverse, (SCALE,), {"scheme": "fp8_static", "multiply": True}),
    "compressed-tensors": (fake_quantized, (HALF,), {"scheme": "fp8_static", "round_values": True}),
}  # fmt: skip
"""How it is quantized, given scales, and what the operator is told."""


@pytest.mark.parametrize("name", RECOGNISED)
def test_recognised(batch, name):
    function, more, options = RECOGNISED[name]
    for rank in (2, 3):
        behind = Behind(batch(), function, *more, rank=rank)
        one = rewritten(behind)
        assert options_of(behind.graph) == options
        assert one.facts["sites"] == {"attention": options["scheme"]}
        assert one.summary() == f"attention writes {options['scheme']}"


def test_a_gpu_divides_by_448_by_its_inverse():
    """So amax * (1 / 448) is the same there; a least amax becomes a least scale in the same way."""
    for divides in (True, False):
        numbers = _Numbers(torch.bfloat16, F32, torch.device("cuda"))
        numbers.floor(0.3)
        numbers.divide(MAX) if divides else numbers.multiply(1 / MAX)
        numbers.finish(None, False)
        floor, inverse = torch.tensor(0.3), torch.tensor(1 / MAX)
        assert numbers.options()["min_scale"] == float(floor * inverse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(batch, dtype):
    """A scale in x's dtype is rounded; float32 has nothing to round."""
    for name in ("torchao PerRow", "with a least scale", "by a norm", "given", "groups of 64"):
        function, more, _ = RECOGNISED[name]
        behind = Behind(batch(dtype), function, *more)
        rewritten(behind)
        options = options_of(behind.graph)
        if dtype == torch.float32:
            assert not options.get("round_scale")
            assert not options.get("round_values")


def check_random_forms(make_batch, first: int, last: int) -> None:
    """Values of any magnitude, with infinities: what is recognised gives the same bits."""
    recognised = 0
    for seed in range(first, last):
        numbers = random.Random(seed)
        dtype = numbers.choice([torch.bfloat16, torch.float16, torch.float32])
        made = make_batch(
            [2, 1, 1, 1, 1, 1], [5, 3, 2, 1, 4, 2], head_size=64, dtype=dtype, seed=seed
        )
        caches = made.kv_cache[:, 1]
        for block in caches:
            block *= 10.0 ** numbers.randint(-44, 5)
        if numbers.random() < 0.3:
            caches[numbers.randrange(len(caches)), 0, 0, 3] = float("inf")
        behind, one = Behind(made, random_form(numbers, dtype)), QuantizeOutput("always")
        wanted = behind.run()
        recognised += one.run(behind.graph)
        same = [torch.equal(a, b) for a, b in zip(behind.run(), wanted, strict=True)]
        assert all(same), f"seed {seed}"
    assert recognised > (last - first) / 5


def test_random_forms(make_batch):
    check_random_forms(make_batch, 0, 12)


@pytest.mark.slow
def test_more_random_forms(make_batch):
    check_random_forms(make_batch, 12, 72)


def test_every_form_is_recognised():
    assert {form.scheme for form in FORMS} == {o["scheme"] for _, _, o in RECOGNISED.values()}


def test_what_attention_was_asked_for_stays(batch):
    """Windows, soft caps, sinks, causal: keywords of `attention` are those of `attention_quant`."""
    asked = {"sliding_window": 3, "soft_cap": 20.0, "causal": True}
    behind = Behind(batch(), row, **asked)
    rewritten(behind)
    assert options_of(behind.graph) == {"scheme": "fp8_row", "round_scale": True, **asked}


def test_the_layout_of_blocks_stays(batch):
    """Batches of the fixture have 4 heads and 2 KV heads; blocks of 4 tokens, one of them seen."""
    tables = BlockTables(local_strided(BlocksparseParams(16, 4, 2, 4, 1, 100)))
    behind = Behind(batch(), row, **layout_arguments(tables))
    plain = Behind(batch(), row).run()
    assert not all(map(torch.equal, behind.run(), plain)), "the layout hides keys"
    rewritten(behind)
    kept = options_of(behind.graph)
    assert kept["sparse_block_size"] == 4
    assert len(kept["block_layout"]) == 4


def test_several_attentions_in_a_graph(batch):
    """Two layers of other geometry, each with its own scheme."""
    made = batch()

    def function(x, q, kv_cache, scale):
        attention = torch.ops.attn_ops.attention
        other = attention(q[:, :2].contiguous(), kv_cache, made.meta, 0.5)
        return *row(x), *given(other.reshape(1, -1, 128), scale)

    behind = Behind(made, function, SCALE, with_inputs=True)
    one, wanted = QuantizeOutput("always"), behind.run()
    assert one.run(behind.graph) == 2
    assert all(torch.equal(a, b) for a, b in zip(behind.run(), wanted, strict=True))
    assert sorted(one.facts["sites"].values()) == ["fp8_row", "fp8_static"]
    assert one.summary() == "attention writes fp8_row and fp8_static"


def test_the_scale_in_any_shape(batch):
    """Products read the scale in a shape of their own; the amax leads to nothing else."""

    def function(x):
        values, scale = row(x)
        return values.view(-1, 256), scale.unsqueeze(-1).view(-1, 1), scale.reciprocal()

    rewritten(Behind(batch(), function))


def cache_zeroed(x, q, kv_cache, scale):
    kv_cache.zero_()
    return row(x)


def cache_zeroed_later(x, q, kv_cache, scale):
    results = row(x)
    kv_cache.zero_()
    return results


def scale_doubled(x, q, kv_cache, scale):
    scale.mul_(2.0)
    return given(x, scale)


def scale_doubled_later(x, q, kv_cache, scale):
    results = given(x, scale)
    scale.mul_(2.0)
    return results


@pytest.mark.parametrize(
    "function", [cache_zeroed, cache_zeroed_later, scale_doubled, scale_doubled_later]
)
def test_what_is_written_around_it(batch, function):
    """Attention reads the cache before that, and the quantization the scale when it did."""
    found = []
    for fuses in (False, True):
        behind = Behind(batch(), function, SCALE.clone(), with_inputs=True)
        if fuses:
            assert QuantizeOutput("always").run(behind.graph) == 1
        behind.batch.kv_cache = behind.batch.kv_cache.clone()
        found.append([*behind.run(), behind.batch.kv_cache, *behind.more])
    for before, after in zip(*found, strict=True):
        assert torch.equal(before.nan_to_num(-7.0), after.nan_to_num(-7.0))


# -- the option `attn_quant` -----------------------------------------------------------------------


@pytest.mark.skipped_when(QuantizeOutput, '`attn_quant` is "auto", and it is on a CPU')
def test_auto_leaves_a_cpu_alone(batch):
    one = QuantizeOutput.of(PassConfig())
    assert one.run(Behind(batch(), given, SCALE).graph) == 0
    assert one.reasons == ["on a CPU the output would be quantized by plain PyTorch"]
    assert one.facts == {}


@pytest.mark.skipped_when(QuantizeOutput, '`attn_quant` is "auto", and a scale')
def test_auto_leaves_a_scale_of_the_batch(batch):
    cuda = torch.device("cuda")
    assert [scheme for scheme in SCHEMES if why_slower(scheme, cuda)] == ["fp8_tensor"]
    assert QuantizeOutput("always").run(Behind(batch(), tensor).graph) == 1


def test_the_option():
    config, rest = PassConfig.split({"attn_quant": "always"})
    assert (config.attn_quant, rest) == ("always", {})
    assert not PassConfig(attn_quant="never").is_on("attn_quant")
    keys = {AtenPipeline(PassConfig(attn_quant=o)).uuid() for o in ("auto", "always", "never")}
    assert len(keys) == 3


# -- behind latent attention -----------------------------------------------------------------------

LATENT = LatentShape(16, 8, 4, 128)


class BehindLatent(Behind):
    """The graph of latent attention, and of what stands behind it."""

    attend = staticmethod(torch.ops.attn_ops.mla_attention)

    def _behind(self, q, kv_cache, *more):
        made = self.batch
        keywords = {"v_head_dim": LATENT.v_head_dim, **self.keywords}
        out = self.attend(q, kv_cache, made.meta, made.kv_b, 0.3, **keywords)
        out = out if isinstance(out, torch.Tensor) else out[0]
        return self.function(out.unsqueeze(0).reshape(1, q.shape[0], -1), *more)


def latent_batch():
    sizes = {"shape": LATENT, "dtype": torch.bfloat16, "num_padding_rows": 2}
    return build_latent_batch([1, 5, 2], [7, 5, 9], num_heads=2, **sizes)


@pytest.mark.parametrize(
    ("function", "more", "scheme"),
    [
        (row, (), "fp8_row"),
        (group, (), "fp8_group128"),
        (given, (SCALE,), "fp8_static"),
    ],
)
def test_behind_latent_attention(function, more, scheme):
    behind = BehindLatent(latent_batch(), function, *more, causal=True)
    one = rewritten(behind)
    (node,) = behind.graph.find_nodes(
        op="call_function", target=torch.ops.attn_ops.mla_attention_quant.default
    )
    asked = {k: node.kwargs[k] for k in ("scheme", "v_head_dim", "causal")}
    assert asked == {"scheme": scheme, "v_head_dim": 128, "causal": True}
    assert not behind.graph.find_nodes(
        op="call_function", target=torch.ops.attn_ops.mla_attention.default
    )
    assert one.summary() == f"attention writes {scheme}"


def test_latent_attention_with_lse_is_left_alone():
    class WithLSE(BehindLatent):
        attend = staticmethod(torch.ops.attn_ops.mla_attention_with_lse)

    behind, one = WithLSE(latent_batch(), row), QuantizeOutput("always")
    assert one.run(behind.graph) == 0
    assert "mla_attention_with_lse has no quantized form" in one.skipped[0]
