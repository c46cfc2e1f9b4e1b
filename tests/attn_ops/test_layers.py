"""`Attention` against a float64 reference: layers with caches of their own, and layers that share.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from attn_ops import Attention, AttentionSpec, PagedKVCache
from attn_ops.backends.torch_backend import reference_attention
from fx_passes.passes.layers import OutlineLayers

BATCHES = [
    ([3, 0, 1, 6], [7, 5, 4, 6]),  # chunk, nothing, decode, whole prompt
    ([1], [1]),
    ([1, 1, 1], [4, 2, 9]),
    ([5], [9]),
]
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 3},
    "soft_cap": {"scale": 0.4, "soft_cap": 2.0},
    "sinks": {"sinks": torch.linspace(-1.0, 1.0, 4)},
}


class Model(nn.Module):
    """Owners, and behind them sharers of the last owner's cache; each adds to q."""

    def __init__(self, num_owners: int, num_sharers: int, **features: Any) -> None:
        super().__init__()
        layers = [Attention(4, 2, 8, **features) for _ in range(num_owners)]
        features["kv_sharing_target"] = layers[-1]
        sharers = [Attention(4, 2, 8, **features) for _ in range(num_sharers)]
        self.layers: Any = nn.ModuleList([*layers, *sharers])

    def forward(self, q, k, v, kv_caches, meta, slot_mapping):
        for i, layer in enumerate(self.layers):
            own = layer.kv_sharing_target is None
            cache = kv_caches[min(i, len(kv_caches) - 1)]
            keys = (k + q.mean(1, keepdim=True), v) if own else (None, None)
            q = q + layer(q, *keys, cache, meta, slot_mapping)
        return q


def reference(model: Model, b, kv_caches) -> torch.Tensor:
    """[T, N, H] float64 of the model over caches that it has written."""
    q = b.q.double()
    for i, layer in enumerate(model.layers):
        cache = kv_caches[min(i, len(kv_caches) - 1)].double()
        q = q + reference_attention(
            q,
            cache,
            b.common,
            layer.scale,
            sliding_window=layer.sliding_window,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
        )
    return q


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_layers_equal_the_reference(make_batch, as_dynamic, num_graphs, feature, compiled):
    model = Model(2, 2, **FEATURES[feature])
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    before = num_graphs()
    for index, lengths in enumerate(BATCHES):
        b = make_batch(*lengths, written=False, seed=index, num_blocks=14)
        caches = [b.kv_cache, b.kv_cache.clone()]
        slots = b.common.slot_mapping.clone()
        for tensor in (b.q, b.k, b.v, slots) if index == 0 else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        with as_dynamic():
            out = run(b.q, b.k, b.v, caches, b.meta, slots)
        wanted = reference(model, b, caches)
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
        blocks, offsets = slots // 4, slots % 4
        keys = b.k + b.q.mean(1, keepdim=True)
        torch.testing.assert_close(caches[0][blocks, 0, offsets], keys, atol=1e-6, rtol=1e-6)
        assert torch.equal(caches[0][blocks, 1, offsets], b.v)
    assert num_graphs() - before == compiled


def test_a_sharer_reads_with_the_scales_of_its_target(make_batch):
    owner = Attention(4, 2, 8)
    sharer = Attention(4, 2, 8, kv_sharing_target=owner)
    owner.k_scale, owner.v_scale = torch.tensor([0.5]), torch.tensor([0.25])
    b = make_batch([3, 1], [3, 1], written=False)
    cache = torch.zeros(b.kv_cache.shape, dtype=torch.uint8)
    first = owner(b.q, b.k, b.v, cache, b.meta, kv_cache_dtype="fp8_e4m3")
    again = sharer(b.q, None, None, cache, b.meta, kv_cache_dtype="fp8_e4m3")
    assert torch.equal(first, again)
    assert first.std() > 0.1


def test_layers_of_equal_geometry_are_one_subgraph(make_batch):
    """Owners become calls of one, and sharers of another."""
    model = Model(4, 4)
    b = make_batch([3, 1], [5, 4], written=False)
    caches = [b.kv_cache.clone() for _ in range(4)]
    slots = b.common.slot_mapping.clone()
    wanted = model(b.q, b.k, b.v, [c.clone() for c in caches], b.meta, slots)
    matches = []

    def backend(gm, inputs):
        matches.append(OutlineLayers().run(gm.graph))
        gm.recompile()
        return gm

    run = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(run(b.q, b.k, b.v, caches, b.meta, slots), wanted)
    assert matches == [8]


def test_a_target_is_no_submodule():
    owner = Attention(4, 2, 8, sinks=nn.Parameter(torch.zeros(4)))
    sharer = Attention(4, 2, 8, sinks=nn.Parameter(torch.ones(4)), kv_sharing_target=owner)
    assert [name for name, _ in sharer.named_modules()] == [""]
    assert list(sharer.state_dict()) == ["sinks"]
    model = nn.ModuleList([owner, sharer])
    assert [name for name, _ in model.named_parameters()] == ["0.sinks", "1.sinks"]
    assert repr(sharer) == "Attention(4, 2, 8, shared cache)"
    model.double()
    assert sharer.kv_sharing_target is owner


@pytest.mark.parametrize("saved", [False, True])
def test_a_copy_shares_within_itself(saved):
    model = Model(1, 2)
    if saved:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(model)
    owner, *sharers = twin.layers
    assert owner is not model.layers[0]
    assert all(sharer.kv_sharing_target is owner for sharer in sharers)


def test_specs():
    owner = Attention(4, 2, 8, sliding_window=3, sinks=torch.zeros(4))
    sharer = Attention(4, 2, 8, sliding_window=3, sinks=torch.ones(4), kv_sharing_target=owner)
    spec = AttentionSpec(4, 2, 8, torch.bfloat16, 3, kv_cache_dtype="fp8_e4m3", sinks=True)
    assert owner.spec(torch.bfloat16, "fp8_e4m3") == spec == sharer.spec(torch.bfloat16, "fp8_e4m3")
    assert len(PagedKVCache([spec], num_tokens=16).tensors) == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"head_size": 16}, "head_size must be that of kv_sharing_target 8, got 16"),
        ({"num_kv_heads": 4}, "num_kv_heads must be that of kv_sharing_target 2, got 4"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"head_size": 0}, "head_size must be at least 1, got 0"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \[4\], got \[3\]"),
    ],
)
def test_geometry_is_refused(other, message):
    numbers: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, **other}
    with pytest.raises(ValueError, match=message):
        Attention(**numbers, kv_sharing_target=Attention(4, 2, 8))


def test_only_the_cache_must_be_that_of_the_target():
    sharer = Attention(8, 2, 8, sliding_window=3, kv_sharing_target=Attention(4, 2, 8))
    assert sharer.spec(torch.float32) == AttentionSpec(8, 2, 8, torch.float32, 3)


def test_a_sharer_is_no_target():
    sharer = Attention(4, 2, 8, kv_sharing_target=Attention(4, 2, 8))
    with pytest.raises(ValueError, match="kv_sharing_target must have a cache of its own"):
        Attention(4, 2, 8, kv_sharing_target=sharer)


def test_what_is_no_tensor_is_refused(make_batch):
    """Arguments in another order, and the caches of all layers instead of one."""
    layer, b = Attention(4, 2, 8), make_batch([3, 1], [5, 4])
    for cache, meta, got in (
        (b.meta, b.kv_cache, "AttentionMetadata"),
        ([b.kv_cache], b.meta, "list"),
    ):
        with pytest.raises(TypeError, match=f"must be tensors.* got Tensor and {got}$"):
            layer(b.q, b.k, b.v, cache, meta)


def test_calls_are_refused(make_batch):
    owner = Attention(4, 2, 8)
    sharer = Attention(4, 2, 8, kv_sharing_target=owner)
    b = make_batch([3, 1], [5, 4])
    before = b.kv_cache.clone()
    for layer, k, v, message in (
        (owner, None, None, "k and v must be tensors, got None"),
        (owner, b.k, None, "k and v must be tensors, got None"),
        (sharer, b.k, b.v, "k and v must be None with kv_sharing_target"),
        (sharer, None, b.v, "k and v must be None with kv_sharing_target"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(b.q, k, v, b.kv_cache, b.meta)
    with pytest.raises(ValueError, match=r"q must have shape \[num_tokens, 4, 8\]"):
        owner(b.k, b.k, b.v, b.kv_cache, b.meta)
    with pytest.raises(ValueError, match=r"kv_cache must have shape .* 2, 8\], got"):
        sharer(b.q, None, None, b.kv_cache[..., :4], b.meta)
    assert torch.equal(b.kv_cache.view(torch.int32), before.view(torch.int32))
