"""FLEX's fused kernels against the float64 oracle on a GPU.

Dynamo is reset after each test that compiles, so each test takes all its cases in one go.
"""

import dataclasses

import pytest
import torch

from attn_ops import (
    AttentionSpec,
    attention,
    attention_with_lse,
    register_backend,
    varlen_attention,
    varlen_metadata,
)
from attn_ops.backends import registry
from attn_ops.backends.flex import flex_backend
from attn_ops.backends.torch_backend import reference_attention
from tests.gpu.attn_ops.test_backends import RAGGED, TOLERANCE, make

pytestmark = pytest.mark.gpu


def check(q, cache, meta, spec, **options):
    """Output and log-sum-exp, padding rows included."""
    options |= {"sliding_window": spec.sliding_window, "soft_cap": spec.soft_cap}
    scale = spec.head_size**-0.5
    out, lse = attention_with_lse(q, cache, meta, scale, **options)
    want_lse = torch.empty_like(lse)
    want = reference_attention(q, cache, meta.common, scale, lse=want_lse, **options)
    compare(out, lse, want, want_lse, (spec, options))


def compare(out, lse, want, want_lse, case):
    assert out.isfinite().all(), case
    error = float((out.double() - want).norm() / want.norm())
    assert error < TOLERANCE[out.dtype], f"relative error {error:.2e}: {case}"
    assert (out[want.abs().amax((1, 2)) == 0] == 0).all(), case
    assert torch.equal(lse.isinf(), want_lse.isinf()), case
    seen = ~want_lse.isinf()
    assert (lse - want_lse)[seen].abs().max() <= max(TOLERANCE[out.dtype], 1e-5) * 3, case


def test_options(num_graphs):
    """Two kernels, for short and long queries, of each: plain, with a cap, ALiBi, sinks."""
    slopes = torch.linspace(0.02, 0.5, 8, device="cuda")
    sinks = torch.linspace(-2, 3, 8, device="cuda")
    geometries = [
        ({}, {}),
        ({"sliding_window": 33}, {}),
        ({"sliding_window": 1}, {}),
        ({"soft_cap": 20.0}, {}),
        ({"soft_cap": 5.0, "sliding_window": 16}, {}),
        ({"alibi": True}, {"alibi_slopes": slopes}),
        ({"sinks": True}, {"sinks": sinks}),
        ({"sinks": True, "sliding_window": 16}, {"sinks": sinks}),
    ]
    before = num_graphs()
    for batch in RAGGED:
        for geometry, options in geometries:
            made = make("FLEX", *RAGGED[batch], 8, 2, 128, torch.bfloat16, pad=5, **geometry)
            check(*made, **options)
    assert num_graphs() - before <= 8


def test_non_causal():
    for window in (None, 33):
        for batch in RAGGED:
            q, cache, meta, spec = make(
                "FLEX", *RAGGED[batch], 8, 2, 64, torch.float16, sliding_window=window
            )
            meta.common = dataclasses.replace(meta.common, causal=False)
            check(q, cache, meta, spec)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    for batch in RAGGED:
        check(*make("FLEX", *RAGGED[batch], 8, 2, 64, dtype, pad=5))


@pytest.mark.parametrize("head_size", [8, 80, 96, 112, 192, 256])
def test_head_sizes(head_size):
    for batch in ("decode", "mixed") if head_size in (80, 256) else ("decode",):
        check(*make("FLEX", *RAGGED[batch], 8, 4, head_size, torch.bfloat16))


@pytest.mark.parametrize("head_size", [128, 192, 256])
def test_wide_float32_heads(head_size):
    """Where PyTorch's own tiles may not fit into shared memory."""
    check(*make("FLEX", *RAGGED["mixed"], 4, 4, head_size, torch.float32))


def test_graphs_do_not_depend_on_lengths(num_graphs):
    before, generator = num_graphs(), torch.Generator().manual_seed(0)

    def pick(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    batches = [([1], [1]), ([200], [200]), ([1, 1], [64, 64]), ([64, 64], [64, 64])]
    for i in range(20):
        query = [pick(0, 200) if i % 2 else pick(0, 3) for _ in range(pick(1, 40))] + [1]
        lengths = (query, [n + pick(0, 500) for n in query])
        lengths = batches[i] if i < len(batches) else lengths
        window = [None, 40, 100][i % 3]
        check(*make("FLEX", *lengths, 8, 2, 128, torch.bfloat16, pad=i % 3, sliding_window=window))
    assert num_graphs() - before <= 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inside_a_compiled_graph(backend):
    """The kernel is compiled in the outer graph's first run."""
    outer = torch.compile(attention, backend=backend, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for batch in ("decode", "mixed", "prefill"):
            q, cache, meta, spec = make("FLEX", *RAGGED[batch], 8, 2, 128, torch.bfloat16)
            out = outer(q, cache, meta, 0.1)
            want = reference_attention(q, cache, meta.common, 0.1)
            assert (out.double() - want).norm() < TOLERANCE[q.dtype] * want.norm(), (batch, spec)


def prefix_oracle(q, cache, meta, prefix):
    """Request by request: causal attention, and the rows of the prefix over all of it."""
    common = meta.common
    causal = dataclasses.replace(common, causal=True)
    lse = torch.empty(q.shape[:2], device="cuda")
    out = reference_attention(q, cache, causal, 0.1, lse=lse)
    starts, seq = common.query_start_loc.tolist(), common.seq_lens.tolist()
    for request, length in enumerate(prefix.tolist()):
        begin, end = starts[request : request + 2]
        first = seq[request] - (end - begin)
        rows = slice(begin, begin + max(0, min(length - first, end - begin)))
        one = torch.full_like(lse, float("nan"))
        cut = common.seq_lens.clone()
        cut[request] = min(length, seq[request])
        whole = reference_attention(
            q, cache, common.replace(
                seq_lens=cut, seq_lens_cpu=cut.cpu(), num_computed_tokens_cpu=None, causal=False
            ), 0.1, lse=one,
        )  # fmt: skip
        out[rows], lse[rows] = whole[rows], one[rows]
    return out, lse


def test_custom_mask(monkeypatch, num_graphs):
    """Prefix-LM; the captured lengths change in place between steps."""
    monkeypatch.setattr(registry, "_registered", {})
    prefix = torch.zeros(8, dtype=torch.int32, device="cuda")

    def prefix_lm(request, query_position, key_position):
        return (key_position < prefix[request]) | (key_position <= query_position)

    register_backend(flex_backend("PREFIX_LM", prefix_lm))
    before = num_graphs()
    for batch, lengths in (
        ("mixed", [3, 0, 0, 7, 260, 1]),
        ("mixed", [5, 400, 0, 2, 171, 0]),
        ("prefill", [1, 33, 200]),
        ("decode", [1, 1, 5, 16, 30, 7]),
    ):
        prefix[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
        q, cache, meta, spec = make(
            "PREFIX_LM", *RAGGED[batch], 8, 2, 128, torch.bfloat16, causal=False
        )
        meta.common = dataclasses.replace(meta.common, causal=False)
        out, lse = attention_with_lse(q, cache, meta, 0.1)
        compare(out, lse, *prefix_oracle(q, cache, meta, prefix[: len(lengths)]), (batch, spec))
    assert num_graphs() - before <= 2


def test_without_a_cache():
    """Values narrower than keys, padding rows of NaN."""
    spec = AttentionSpec(8, 2, 64, torch.bfloat16, causal=False)
    meta = varlen_metadata([3, 0, 1, 140], spec, "cuda", num_padded_tokens=150, backend="FLEX")
    q, k, v = (
        torch.randn(150, n, size, device="cuda", dtype=torch.bfloat16)
        for n, size in ((8, 64), (2, 64), (2, 32))
    )
    for x in (q, k, v):
        x[144:] = float("nan")
    out = varlen_attention(q, k, v, meta, 0.1)
    reference = varlen_metadata(
        [3, 0, 1, 140], spec, "cuda", num_padded_tokens=150, backend="TORCH"
    )
    want = varlen_attention(q.float(), k.float(), v.float(), reference, 0.1)
    assert (out.float() - want).norm() < TOLERANCE[out.dtype] * want.norm()
    assert (out[144:] == 0).all()
