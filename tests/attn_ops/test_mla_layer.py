"""`MLAAttention` against attention over the keys and values that its projection makes."""

import pytest
import torch
from torch import nn

from attn_ops import LatentShape, MLAAttention, PagedKVCache
from attn_ops.backends.mla.torch_mla import reference_mla_attention
from attn_ops.metadata import CommonAttentionMetadata, LatentOptions
from tests.kit.batches import build_metadata

SHAPE = LatentShape(16, 6, 4, 5)
BATCHES = [([3, 0, 1, 20], [7, 5, 4, 20]), ([1], [1]), ([1, 1], [9, 2])]


class Model(nn.Module):
    """Two layers; the second reads a projection that the model owns."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(16, 3 * 11, bias=False)
        self.layers = nn.ModuleList(
            [MLAAttention(3, SHAPE), MLAAttention(3, SHAPE, 0.4, kv_b_proj=self.kv_b_proj)]
        )

    def forward(self, q, kv_c, k_pe, caches, meta, slots):
        for layer, cache in zip(self.layers, caches, strict=True):
            out = layer(q, kv_c, k_pe, cache, meta, slots)
            q = q + torch.nn.functional.pad(out, (0, 5))
        return q


def step(model, lengths, dtype=torch.float64):
    """Arguments of a forward over empty caches full of random latents of earlier steps."""
    query, seq = lengths
    specs = [layer.spec(dtype) for layer in model.layers]
    cache = PagedKVCache(specs, num_tokens=200, block_size=4)
    for tensor in cache.tensors:
        tensor.normal_(generator=torch.Generator().manual_seed(1))
    for i, length in enumerate(seq):
        cache.reserve(i, length)
    table = cache.block_table(range(len(seq)))
    common = CommonAttentionMetadata.from_lengths(query, seq, table, 4)
    meta = build_metadata("TORCH_MLA", common, specs, 4)
    rows = sum(query)
    q, kv_c, k_pe = (torch.randn(rows, *n, dtype=dtype) for n in ((3, 10), (16,), (4,)))
    return q, kv_c, k_pe, cache.tensors, meta, common.slot_mapping


def reference(model, q, kv_c, k_pe, caches, meta, slots):
    for layer, cache in zip(model.layers, caches, strict=True):
        cache = cache.clone()
        cache.flatten(0, 1)[slots] = torch.cat([kv_c, k_pe], -1)
        options = LatentOptions(layer.scale, layer.kv_b_proj.weight, 5)
        out = reference_mla_attention(q, cache, meta.common, options)
        q = q + torch.nn.functional.pad(out, (0, 5))
    return q


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_of_two_layers(compiled):
    model = Model().double()
    run = torch.compile(model, backend="aot_eager", dynamic=True) if compiled else model
    for lengths in BATCHES:
        arguments = step(model, lengths)
        want = reference(model, *arguments)
        torch.testing.assert_close(run(*arguments), want, rtol=1e-12, atol=1e-12)


def test_the_state_has_each_projection_once():
    assert list(Model().state_dict()) == ["kv_b_proj.weight", "layers.0.kv_b_proj.weight"]


@torch.no_grad()
def test_fp8_caches_have_a_scale():
    layer = MLAAttention(3, SHAPE)
    layer.kv_scale = torch.tensor([0.5])
    spec = layer.spec(torch.float32, "fp8_e4m3")
    cache = torch.zeros(spec.cache_shape(9, 4), dtype=spec.cache_dtype)
    common = CommonAttentionMetadata.from_lengths([6], [6], [[3, 5]], 4)
    meta = build_metadata("TORCH_MLA", common, spec, 4)
    q, kv_c, k_pe = torch.randn(6, 3, 10), torch.randn(6, 16), torch.randn(6, 4)
    out = layer(q, kv_c, k_pe, cache, meta, kv_cache_dtype="fp8_e4m3")
    stored = torch.cat([kv_c, k_pe], -1) / 0.5
    assert torch.equal(cache[3], stored[:4].to(torch.float8_e4m3fn).view(torch.uint8))
    options = LatentOptions(layer.scale, layer.kv_b_proj.weight, 5, "fp8_e4m3", layer.kv_scale)
    want = reference_mla_attention(q, cache, common, options)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_a_quantized_projection_is_dequantized():
    class Quantized(torch.Tensor):
        def dequantize(self):
            return self.as_subclass(torch.Tensor) * 2

    layer = MLAAttention(3, SHAPE)
    plain = layer.kv_b_proj.weight.detach().clone()
    layer.kv_b_proj.weight = nn.Parameter(plain.as_subclass(Quantized), requires_grad=False)
    torch.testing.assert_close(
        layer._weight(torch.zeros(1, dtype=torch.float64)), plain.double() * 2
    )


class Adapted(nn.Module):
    """As peft adapts a layer: `weight` is the one without the adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 33, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@torch.no_grad()
@pytest.mark.parametrize("projection", [Adapted, lambda base: Doubled(16, 33, bias=False)])
def test_a_projection_counts_as_what_it_computes(projection):
    """Not as its attribute `weight` alone."""
    linear = nn.Linear(16, 33, bias=False)
    layer = MLAAttention(3, SHAPE, kv_b_proj=projection(linear))
    columns = layer.kv_b_proj(torch.eye(16)).t()
    torch.testing.assert_close(layer._weight(torch.zeros(1, 3, 10)), columns)
    assert not torch.allclose(linear.weight, columns)


def test_a_model_may_replace_its_projection():
    model = Model()
    model.kv_b_proj = nn.Linear(16, 33, bias=False)
    model.layers[1].kv_b_proj = model.kv_b_proj
    assert model.layers[1].kv_b_proj is model.kv_b_proj
    assert list(model.state_dict()) == list(Model().state_dict())
    with pytest.raises(ValueError, match=r"weight of shape \[33, 16\] and no bias"):
        model.layers[1].kv_b_proj = nn.Linear(16, 32, bias=False)


@torch.no_grad()
def test_a_projection_that_does_not_fit_any_more_is_refused_before_the_write():
    model = Model().double()
    q, kv_c, k_pe, caches, meta, slots = step(model, ([3], [7]))
    before = caches[0].clone()
    model.layers[0].kv_b_proj = nn.Linear(16, 32, bias=False)
    with pytest.raises(ValueError, match=r"kv_b_proj must have a weight of shape \[33, 16\]"):
        model.layers[0](q, kv_c, k_pe, caches[0], meta, slots)
    assert torch.equal(caches[0], before)


@pytest.mark.parametrize("lengths", BATCHES)
def test_gradients_are_not_computed(lengths):
    """With gradients on, numbers are the same; nothing writes them to given memory."""
    model = Model().double()
    arguments = step(model, lengths)
    caches = [cache.clone() for cache in arguments[3]]
    with torch.no_grad():
        want = model(*arguments[:3], caches, *arguments[4:])
    tensors = [x.requires_grad_() for x in arguments[:3]]
    assert torch.equal(model(*tensors, *arguments[3:]), want)


@torch.no_grad()
def test_inference_mode_of_one_step_binds_no_other():
    """The workspace that the first step allocates is written by the next ones."""
    model = Model().double()
    q, kv_c, k_pe, caches, meta, slots = step(model, ([20], [20]))
    with torch.inference_mode():
        tensors = [x.clone() for x in (q, kv_c, k_pe)]
        want = model(*tensors, [cache.clone() for cache in caches], meta, slots)
    assert torch.equal(model(q, kv_c, k_pe, caches, meta, slots), want)


@pytest.mark.parametrize(
    ("projection", "message"),
    [
        (nn.Linear(16, 32, bias=False), r"weight of shape \[33, 16\] and no bias, got \[32, 16\]"),
        (nn.Linear(16, 33), r"no bias, got \[33, 16\] with a bias"),
        (nn.Identity(), "got None"),
    ],
)
def test_projections_that_do_not_fit_are_refused(projection, message):
    with pytest.raises(ValueError, match=message):
        MLAAttention(3, SHAPE, kv_b_proj=projection)


def test_q_of_another_shape_is_refused():
    layer = MLAAttention(3, SHAPE)
    with pytest.raises(ValueError, match=r"q must have shape \[num_tokens, 3, 10\]"):
        layer(torch.zeros(2, 3, 9), None, None, None, None)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        MLAAttention(0, SHAPE)
