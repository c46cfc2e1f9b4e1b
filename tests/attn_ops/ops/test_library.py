"""Gradients: no operator computes any, and backward says so, in eager and in compiled code."""

import pytest
import torch

from attn_ops import (
    Attention,
    AttentionSpec,
    attention,
    get_backend,
    mla_attention,
    varlen_metadata,
    write_mla_kv,
)
from tests.kit.batches import build_batch
from tests.kit.latent import build_latent_batch

WITHOUT = {"advance_step", "no_backward", "slot_mapping"}
"""Operators of integers, and the one that raises."""

refused = pytest.raises(NotImplementedError, match=r'attn_ops::.*attn_implementation="sdpa"')


def calls() -> dict[str, tuple[tuple, dict]]:
    """Arguments of every operator, by its name."""
    torch.manual_seed(0)
    b = build_batch([3, 1], [5, 4], head_size=16, block_size=16)
    latent = build_latent_batch([3, 1], [5, 4])
    states = (torch.randn(4, 2, 64), torch.randn(4, 2)) * 2
    quant = {"scheme": "fp8_static", "out_scale": torch.tensor([0.5])}
    x, weight = torch.randn(3, 8), torch.ones(8)
    pairs, zero = torch.tensor([[1, 2]]), torch.zeros(2, dtype=torch.int32)
    tables, lengths = b.common.block_table_tensor, b.common.seq_lens
    out = torch.zeros(9, latent.kv_cache.shape[2])
    own = varlen_metadata([3, 1], AttentionSpec(4, 2, 16, torch.float32))
    paged, starts = (b.q, b.kv_cache, b.meta, 0.3), torch.tensor([0, 5, 9], dtype=torch.int32)
    found = {
        "attention": (paged,),
        "attention_with_lse": (paged,),
        "attention_quant": (paged, quant),
        "copy_blocks": (([torch.ones(4, 2, 16, 2, 16)] * 2, pairs),),
        "gated_mlp": ((x, x, weight, 1e-6, torch.randn(8, 8), torch.randn(4, 8)),),
        "gather_kv": ((b.kv_cache, tables, lengths, 9),),
        "gather_mla_kv": ((latent.kv_cache, latent.common.block_table_tensor, starts, zero, out),),
        "merge_attn_states": (states,),
        "merge_attn_states_quant": (states, quant),
        "mla_attention": (latent.arguments, latent.keywords),
        "mla_attention_with_lse": (latent.arguments, latent.keywords),
        "mla_attention_quant": (latent.arguments, latent.keywords | quant),
        "norm_mm": ((x, weight, 1e-6, torch.randn(8, 4)),),
        "skinny_mm": ((x, torch.randn(8, 4)),),
        "swap_blocks": ((torch.ones(4, 2, 16, 2, 16), torch.ones(4, 2, 16, 2, 16), pairs),),
        "varlen_attention": ((b.q, b.k, b.v, own, 0.3),),
        "write_kv": ((b.k, b.v, b.kv_cache, b.meta),),
        "write_mla_kv": ((latent.kv_c, latent.k_pe, latent.kv_cache, latent.meta),),
    }
    return {name: (call[0], *call[1:], {})[:2] for name, call in found.items()}


def test_every_operator_is_here():
    schemas = [s.name.partition("::") for s in torch._C._jit_get_all_schemas()]
    assert {name for space, _, name in schemas if space == "attn_ops"} == calls().keys() | WITHOUT


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", calls())
def test_backward_raises(name, compiled):
    operator = getattr(torch.ops.attn_ops, name).default
    args, keywords = calls()[name]
    written = [a.is_write for a in operator._schema.arguments]

    def function(args, factor):
        def scaled(x):
            one = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x * factor if one else [scaled(i) for i in x] if isinstance(x, list) else x

        # What is written requires grad by itself in `copy_blocks` alone.
        keep = written if name != "copy_blocks" else [False] * len(args)
        args = [x if kept else scaled(x) for x, kept in zip(args, keep, strict=False)]
        results = operator(*args, **keywords)
        if results is None:
            results = args[written.index(True)]
        return [results] if isinstance(results, torch.Tensor) else list(results)

    with torch.no_grad():
        want = function(calls()[name][0], 1.0)
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    factor = torch.ones((), requires_grad=True)
    results = function(args, factor)
    for result, expected in zip(results, want, strict=True):
        assert torch.equal(result.float().nan_to_num(), expected.float().nan_to_num())
        with refused:
            result.float().nan_to_num().sum().backward(retain_graph=True)
    assert factor.grad is None


@pytest.mark.parametrize(
    ("backend", "compile_with"),
    [
        ("TORCH", None),
        ("TRITON", None),
        ("FLEX", None),
        ("TORCH", "inductor"),
        ("FLEX", "attn_ops"),
    ],
)
def test_a_cache_that_is_written_with_gradients_hands_the_refusal_on(backend, compile_with):
    """Only v requires grad: attention sees it by the cache, and so does the next call."""
    backend = get_backend(backend)
    b = build_batch([3, 1], [5, 4], head_size=16, block_size=16, backend=backend, written=False)
    layer, factor = Attention(4, 2, 16), torch.ones((), requires_grad=True)

    def step(q, k, v, kv_cache, meta):
        return layer(q, k, v * factor, kv_cache, meta)

    run = step if compile_with is None else torch.compile(step, backend=compile_with)
    caches = [b.kv_cache.clone() for _ in range(2)]
    with torch.no_grad():
        want = step(b.q, b.k, b.v, caches[0], b.meta)
    out = run(b.q, b.k, b.v, caches[1], b.meta)
    assert torch.equal(out, want)
    assert torch.equal(caches[0].nan_to_num(), caches[1].nan_to_num())
    for result in (out, attention(b.q, caches[1], b.meta, 0.3)):
        with refused:
            result.sum().backward()


def test_traced_write_of_latents():
    """A trace writes them by `index_put_`."""
    b, factor = (
        build_latent_batch([3, 1], [5, 4], written=False),
        torch.ones((), requires_grad=True),
    )

    def write(kv_c, k_pe, kv_cache, meta):
        write_mla_kv(kv_c * factor, k_pe, kv_cache, meta)

    torch.compile(write, backend="aot_eager")(b.kv_c, b.k_pe, b.kv_cache, b.meta)
    with refused:
        mla_attention(*b.arguments, **b.keywords).sum().backward()


def test_inference_pays_no_autograd():
    """No tensor requires grad, or gradients are off: outputs are plain."""
    b = build_batch([3, 1], [5, 4])
    assert attention(b.q, b.kv_cache, b.meta, 0.3).grad_fn is None
    with torch.no_grad():
        assert attention(b.q.requires_grad_(), b.kv_cache, b.meta, 0.3).grad_fn is None
