"""quantize_output: forms that are recognised give the same bits."""

import random

import pytest
import torch

from attn_ops.block_layout import BlocksparseParams, BlockTables, local_strided
from attn_ops.block_layout.tables import layout_arguments
from fx_passes.analysis.quantize_forms import FORMS
from fx_passes.analysis.quantize_scales import _Numbers
from fx_passes.passes.quantize_output import QuantizeOutput
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
