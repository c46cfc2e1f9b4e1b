"""Gradients: no operator computes any, and backward says so, in eager and in compiled code."""

import functools
import inspect

import pytest
import torch
from torch.autograd import forward_ad

from attn_ops import (
    Attention,
    AttentionSpec,
    attention,
    gather_kv,
    get_backend,
    mla_attention,
    varlen_metadata,
    write_kv,
    write_mla_kv,
)
from attn_ops.ops import collectives  # noqa: F401  otherwise imported with ranks alone
from tests.kit.batches import build_batch
from tests.kit.latent import build_latent_batch

WITHOUT = {"advance_step", "no_backward", "slot_mapping", "all_gather", "all_reduce"}
"""Operators of integers, the one that raises, and those of ranks (test_collectives.py)."""

refused = pytest.raises(NotImplementedError, match=r'attn_ops::.*attn_implementation="sdpa"')


def calls() -> dict[str, tuple[tuple, dict]]:
    """Arguments of every operator, by its name."""
    torch.manual_seed(0)
    b = build_batch([3, 1], [5, 4], head_size=16, block_size=16)
    latent = build_latent_batch([3, 1], [5, 4])
    states = (torch.randn(4, 2, 64), torch.randn(4, 2)) * 2
    quant = {"scheme": "fp8_static", "out_scale": torch.tensor([0.5])}
    x, weight, w = torch.randn(3, 8), torch.ones(8), torch.randn(8, 4)
    pairs, zero = torch.tensor([[1, 2]]), torch.zeros(2, dtype=torch.int32)
    tables, lengths = b.common.block_table_tensor, b.common.seq_lens
    out = torch.zeros(9, latent.kv_cache.shape[2])
    own = varlen_metadata([3, 1], AttentionSpec(4, 2, 16, torch.float32))
    paged, starts = (b.q, b.kv_cache, b.meta, 0.3), torch.tensor([0, 5, 9], dtype=torch.int32)
    rule, channels = torch.randn(3, 2, 8), -torch.rand(8, 2)
    one = (torch.tensor([1]), torch.tensor([0, 3]), torch.tensor([3]))
    pool, dt, steps = torch.zeros(2, 2, 8, 8), torch.rand(3, 2), torch.randn(3, 2)
    found = {
        "add_rms_norm": ((x, x, weight, 1e-6),),
        "attention": (paged,),
        "attention_with_lse": (paged,),
        "attention_quant": (paged, quant),
        "causal_conv1d_update": ((x, w, weight, "silu", torch.zeros(2, 8, 3), *one),),
        "copy_blocks": (([torch.ones(4, 2, 16, 2, 16)] * 2, pairs),),
        "experts": ((x, torch.randn(2, 8, 8), torch.randn(2, 8, 4), pairs.expand(3, 2) - 1, dt),),
        "gated_delta_rule": ((rule, rule, rule, -dt, dt, True, pool, *one),),
        "gated_mlp": ((x, x, weight, 1e-6, torch.randn(8, 8), torch.randn(4, 8)),),
        "gather_kv": ((b.kv_cache, tables, lengths, 9),),
        "gather_mla_kv": ((latent.kv_cache, latent.common.block_table_tensor, starts, zero, out),),
        "kda": ((rule, rule, rule, -rule.abs(), dt, True, pool, *one),),
        "merge_attn_states": (states,),
        "merge_attn_states_quant": (states, quant),
        "mla_attention": (latent.arguments, latent.keywords),
        "mla_attention_with_lse": (latent.arguments, latent.keywords),
        "mla_attention_quant": (latent.arguments, latent.keywords | quant),
        "norm_mm": ((x, weight, 1e-6, w),),
        "rms_norm": ((x, weight, 1e-6),),
        "selective_state_update": (
            (x, x, channels, steps, steps, weight, x, weight, True, torch.zeros(2, 8, 2), *one),
        ),
        "skinny_mm": ((x, w),),
        "ssd_state_update": (
            (rule, dt, -dt[0], rule, rule, dt[0], dt[0], True, None, None, None, pool, *one),
        ),
        "swap_blocks": ((torch.ones(4, 2, 16, 2, 16), torch.ones(4, 2, 16, 2, 16), pairs),),
        "top_experts": ((x, 2), {"softmax": True}),
        "varlen_attention": ((b.q, b.k, b.v, own, 0.3),),
        "write_kv": ((b.k, b.v, b.kv_cache, b.meta),),
        "write_mla_kv": ((latent.kv_c, latent.k_pe, latent.kv_cache, latent.meta),),
    }
    return {name: (call[0], *call[1:], {})[:2] for name, call in found.items()}


def scaled_call(name: str):
    """A call of an operator with what it reads times a factor: what it returns or writes."""
    operator, (_, keywords) = getattr(torch.ops.attn_ops, name).default, calls()[name]
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

    return function


def test_every_operator_is_here():
    schemas = [s.name.partition("::") for s in torch._C._jit_get_all_schemas()]
    assert {name for space, _, name in schemas if space == "attn_ops"} == calls().keys() | WITHOUT


def test_a_wrapper_has_the_signature_of_its_operator():
    assert inspect.signature(gather_kv).parameters["dtype"].default is None
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'out'"):
        gather_kv(*calls()["gather_kv"][0], out=None)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", calls())
def test_backward_raises(name, compiled):
    function = scaled_call(name)
    with torch.no_grad():
        want = function(calls()[name][0], 1.0)
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    factor = torch.ones((), requires_grad=True)
    results = function(calls()[name][0], factor)
    for result, expected in zip(results, want, strict=True):
        assert torch.equal(result.float().nan_to_num(), expected.float().nan_to_num())
        if not expected.is_floating_point():
            continue  # integers have no gradient to compute
        with refused:
            result.float().nan_to_num().sum().backward(retain_graph=True)
    assert factor.grad is None


def dual_call(function, one):
    with forward_ad.dual_level(), torch.no_grad():  # which tangents do not heed
        function(forward_ad.make_dual(one, one))


DIFFERENTIATE = {
    "grad": lambda function, one: torch.func.grad(function)(one),
    "vjp": torch.func.vjp,
    "jvp": lambda function, one: torch.func.jvp(function, (one,), (one,)),
    "vmap": lambda function, one: torch.func.vmap(function)(torch.stack([one, one])),
    "dual": dual_call,
}


@pytest.mark.parametrize("name", calls())
def test_what_has_no_backward_is_refused_when_it_is_called(name):
    """functorch hides from an operator what is differentiated, and tangents need no history."""
    call, (args, _) = scaled_call(name), calls()[name]

    def function(factor):
        return sum(x.float().nan_to_num().sum() for x in call(args, factor))

    for differentiate in DIFFERENTIATE.values():
        with refused:
            differentiate(function, torch.ones(()))


@pytest.mark.parametrize("outside", [False, True])
def test_gradients_by_torch_func_of_compiled_code_are_refused(outside):
    """Whichever is around the other."""
    b = build_batch([3, 1], [5, 4])
    compiled = functools.partial(torch.compile, backend="aot_eager")

    def function(q):
        return attention(q, b.kv_cache, b.meta, 0.3).square().sum()

    grad = torch.func.grad(compiled(function)) if outside else compiled(torch.func.grad(function))
    with refused:
        grad(b.q)


def test_a_call_beside_tangents_is_not_refused():
    b = build_batch([3, 1], [5, 4])
    want = attention(b.q, b.kv_cache, b.meta, 0.3)
    with forward_ad.dual_level():
        assert torch.equal(attention(b.q, b.kv_cache, b.meta, 0.3), want)


@pytest.mark.parametrize(
    ("backend", "compile_with"),
    [
        *((name, None) for name in ("TORCH", "TRITON", "FLEX")),
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
    b, factor = build_latent_batch([3, 1], [5, 4], written=False), torch.ones(())
    factor.requires_grad_()

    def write(kv_c, k_pe, kv_cache, meta):
        write_mla_kv(kv_c * factor, k_pe, kv_cache, meta)

    torch.compile(write, backend="aot_eager")(b.kv_c, b.k_pe, b.kv_cache, b.meta)
    with refused:
        mla_attention(*b.arguments, **b.keywords).sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("asked", ["k", "v", "k_scale", "latent"])
def test_a_write_to_an_fp8_cache_is_refused_at_once(asked, compiled):
    """Integers hand no refusal on."""
    factor, fp8 = torch.ones((), requires_grad=True), {"kv_cache_dtype": "fp8_e4m3"}
    if asked == "latent":
        b = build_latent_batch([3, 1], [5, 4], written=False, **fp8)
        write, inputs, name = write_mla_kv, {"kv_c": b.kv_c, "k_pe": b.k_pe}, "k_pe"
        kv_cache = b.kv_cache
    else:
        b = build_batch([3, 1], [5, 4], written=False)
        write, inputs = write_kv, {"k": b.k, "v": b.v, "k_scale": torch.ones(1)}
        name, kv_cache = asked, torch.zeros(b.kv_cache.shape, dtype=torch.uint8)

    def step(kv_cache, meta, factor):
        write(kv_cache=kv_cache, meta=meta, **inputs | {name: inputs[name] * factor}, **fp8)

    run = torch.compile(step, backend="aot_eager") if compiled else step
    before = kv_cache.clone()
    with refused:
        run(kv_cache, b.meta, factor)
    assert torch.equal(kv_cache, before)
    with torch.no_grad():
        run(kv_cache, b.meta, factor)
    assert not torch.equal(kv_cache, before)


def history(x: torch.Tensor) -> set:
    """The autograd nodes behind x."""
    found, left = set(), [x.grad_fn]
    while left:
        if (node := left.pop()) is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize("is_view", [False, True])
def test_steps_with_gradients_hold_no_step_before(is_view):
    """A view: that of a cache whose heads stand before its tokens."""
    b = build_batch([3, 1], [5, 4])
    cache = b.kv_cache.transpose(2, 3).contiguous().transpose(2, 3) if is_view else b.kv_cache
    layer, factor, sizes = Attention(4, 2, b.q.shape[2]), torch.ones((), requires_grad=True), []
    for _ in range(4):
        k, v = b.k * factor, b.v * factor
        out = layer(b.q * factor, k, v, cache, b.meta)
        sizes.append(len(history(out)))
    assert len(set(sizes)) == 1, sizes
    for wanted in (factor, k, v):
        with refused:
            torch.autograd.grad(out.sum(), wanted, retain_graph=True)
    write_kv(b.k, b.v, cache, b.meta)  # without gradients: the cache's own stand
    out = layer(b.q, b.k, b.v, cache, b.meta)
    assert len(history(out)) <= sizes[0]
    with refused:
        torch.autograd.grad(out.sum(), k)


def test_inference_pays_no_autograd():
    """No tensor requires grad, or gradients are off: outputs are plain."""
    b = build_batch([3, 1], [5, 4])
    assert attention(b.q, b.kv_cache, b.meta, 0.3).grad_fn is None
    with torch.no_grad():
        assert attention(b.q.requires_grad_(), b.kv_cache, b.meta, 0.3).grad_fn is None
