"""FLASH_ATTN over E4M3 caches, and without a cache, against the float64 oracle on a GPU."""

import pytest
import torch

from attn_ops import (
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
    attention_with_lse,
    get_backend,
    varlen_attention,
    varlen_metadata,
)
from attn_ops.backends.flash_attn.library import fa_version
from attn_ops.backends.torch_backend import reference_attention
from tests.kit.queries import reference_quantize_query, reference_quantize_tokens

pytestmark = pytest.mark.gpu

RAGGED = {
    "decode": ([1] * 6, [1, 2, 16, 17, 300, 1000]),
    "mixed": ([1, 1, 0, 7, 130, 1], [5, 400, 0, 7, 300, 1]),
    "prefill": ([1, 64, 513], [1, 64, 513]),
    "uniform": ([4, 4, 4], [4, 100, 35]),
}
KERNEL = 4e-2
"""Of the kernel alone: it rounds weights to E4M3 too, 2.6% of each in the root mean square."""

WHOLE = 6e-2
"""Of the operator: q is rounded besides."""


@pytest.fixture(autouse=True)
def fa3():
    if fa_version() != 3:
        pytest.skip("no FA3 of vLLM's build")


def make(query, seq, heads=(8, 2), head_size=128, dtype=torch.bfloat16, block_size=16, **options):
    """(q, cache, metadata, options of `attention`): FP8 cache, NaN outside of the valid tokens."""
    width = max(1, -(-max(seq) // block_size))
    num_blocks = len(seq) * width + 1
    shape = (num_blocks, 2, block_size, heads[1], head_size)
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    table = (torch.randperm(num_blocks - 1)[: len(seq) * width] + 1).view(len(seq), width).int()
    for blocks, length in zip(table.long(), seq, strict=True):
        for first in range(0, length, block_size):
            written[blocks[first // block_size], : length - first] = True
    values = torch.randn(shape).masked_fill(~written[:, None, :, None, None], float("nan"))
    cache = values.to(torch.float8_e4m3fn).view(torch.uint8).cuda()
    common = CommonAttentionMetadata.from_lengths(
        query, seq, table, block_size, "cuda", num_padded_tokens=sum(query) + 3
    )
    q = torch.randn(sum(query) + 3, heads[0], head_size, device="cuda", dtype=dtype)
    q[sum(query) :] = float("nan")
    sinks = options.pop("sinks", False)
    asked = {"kv_cache_dtype": "fp8_e4m3", **options}
    spec = AttentionSpec(heads[0], heads[1], head_size, dtype, sinks=sinks, **asked)
    if sinks:
        asked["sinks"] = torch.linspace(-2, 3, heads[0], device="cuda").bfloat16().float()
    asked |= {n: torch.tensor([x], device="cuda") for n, x in (("k_scale", 0.5), ("v_scale", 1.7))}
    backend = get_backend("FLASH_ATTN")
    return q, cache, backend.builder(backend, [spec], block_size, "cuda").build(0, common), asked


def error(out, want):
    return float((out.double() - want).norm() / want.norm())


def check(q, cache, meta, options, kernel=KERNEL, whole=WHOLE):
    scale, rows = q.shape[2] ** -0.5, meta.common.num_actual_tokens
    out = attention(q, cache, meta, scale, **options)
    assert out.dtype == q.dtype
    assert out.isfinite().all()
    assert (out[rows:] == 0).all()
    rounded = as_rounded(q, meta.common, cache.shape[3])
    found = error(out, reference_attention(rounded, cache, meta.common, scale, **options))
    assert found < kernel, f"the kernel alone: relative error {found:.2e}"
    found = error(out, reference_attention(q, cache, meta.common, scale, **options))
    assert found < whole, f"relative error {found:.2e}"


def as_rounded(q, common, num_kv_heads):
    """q in float64 as FA3 is given it: single tokens by scales of their own; padding rows are 0."""
    rows = common.num_actual_tokens
    if common.max_query_len > 1:
        rounded, scale = reference_quantize_query(q, rows)
        return rounded.double() * scale
    rounded, scale_SK = reference_quantize_tokens(q, common.query_start_loc, num_kv_heads)
    scale_TK = scale_SK.repeat_interleave(common.query_start_loc.diff(), 0)
    rounded = rounded.double()
    rounded[:rows] *= scale_TK.repeat_interleave(q.shape[1] // num_kv_heads, 1)[:, :, None]
    return rounded


FEATURES = {
    "plain": {},
    "window": {"sliding_window": 33},
    "soft cap": {"soft_cap": 20.0},
    "both": {"sliding_window": 16, "soft_cap": 5.0},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("batch", RAGGED)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_oracle(batch, feature, dtype):
    check(*make(*RAGGED[batch], dtype=dtype, **FEATURES[feature]))


@pytest.mark.parametrize("head_size", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("window", [None, 40])
def test_sizes(head_size, block_size, window):
    for batch in RAGGED.values():
        check(*make(*batch, (4, 1), head_size, block_size=block_size, sliding_window=window))


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (32, 8), (6, 2), (16, 1)])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_single_tokens_have_scales_of_their_own(heads, head_size):
    """Queries of requests and kv heads lie up to 2^12 apart; one without a token is among them."""
    query, seq = [1, 1, 0, 1, 1, 1], [1, 400, 0, 17, 300, 1000]
    q, cache, meta, options = make(query, seq, heads, head_size)
    num_rows, group = sum(query), heads[0] // heads[1]
    factor = torch.exp2(-torch.randint(0, 13, (num_rows, heads[1]), device="cuda").float())
    q[:num_rows] *= factor.repeat_interleave(group, 1)[:, :, None].to(q.dtype)
    check(q, cache, meta, options)
    out = attention(q, cache, meta, head_size**-0.5, **options)
    want = reference_attention(q, cache, meta.common, head_size**-0.5, **options)
    for row in range(num_rows):  # none hides behind a larger one
        assert error(out[row], want[row]) < 2 * WHOLE


@pytest.mark.parametrize("batch", RAGGED)
def test_equal_weights_are_exact(batch):
    """Queries of 0 see the mean of the values: no rounding of FP8's, so neither scale nor mask."""
    q, cache, meta, options = make(*RAGGED[batch])
    q[: meta.common.num_actual_tokens] = 0
    check(q, cache, meta, options, kernel=5e-3, whole=5e-3)


@pytest.mark.parametrize("batch", RAGGED)
@pytest.mark.parametrize("feature", ["plain", "soft cap", "sinks"])
def test_log_sum_exp(batch, feature):
    q, cache, meta, options = make(*RAGGED[batch], **FEATURES[feature])
    _, lse = attention_with_lse(q, cache, meta, 128**-0.5, **options)
    want = torch.empty(q.shape[:2], device="cuda")
    reference_attention(q, cache, meta.common, 128**-0.5, lse=want, **options)
    assert torch.equal(lse.isinf(), want.isinf())
    assert (lse - want)[~want.isinf()].abs().max() < 0.12


def test_quantized_queries_are_the_references():
    from attn_ops.backends.flash_attn.triton import quantize

    for largest in (1e-3, 1.0, 448.0, 449.0, 3e4):
        wide = torch.randn(700, 8, 256, device="cuda", dtype=torch.bfloat16)
        q = wide[..., :128]
        q *= largest / 4
        q[600:] = float("nan")
        out, scale = quantize.quantize_query(q, 600)
        want, want_scale = reference_quantize_query(q, 600)
        assert torch.equal(scale, want_scale)
        assert torch.equal(out[:600].float(), want[:600].float())


@pytest.mark.parametrize("heads", [(8, 2), (32, 8), (3, 1), (4, 4), (64, 1)])
@pytest.mark.parametrize("head_size", [64, 96, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantized_tokens_are_the_references(heads, head_size, dtype):
    """300 requests, some without a token; padding rows, and one of a request, are NaN."""
    from attn_ops.backends.flash_attn.triton import quantize

    lengths = (torch.rand(300, device="cuda") < 0.8).int()
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    rows = int(starts[-1])
    wide = torch.randn(310, heads[0], 2 * head_size, device="cuda", dtype=dtype)
    q = wide[..., :head_size]
    q *= torch.exp2(torch.randint(-12, 10, (310, heads[0], 1), device="cuda").float()).to(dtype)
    q[rows:], q[1] = float("nan"), float("nan")
    out, scale = quantize.quantize_tokens(q, starts, heads[1])
    want, want_scale = reference_quantize_tokens(q, starts, heads[1])
    assert torch.equal(scale, want_scale)
    assert out[1].float().isnan().all()
    live = [0, *range(2, rows)]
    assert torch.equal(out[live].float(), want[live].float())


def test_captured_and_replayed():
    """Scales of q, lengths and tables are read anew; padding requests hold NaN queries."""
    query, seq = [1] * 8, [64] * 8
    q, cache, meta, options = make(query, seq, (32, 8))
    cache = torch.randn(cache.shape, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    common, builder = meta.common, get_backend("FLASH_ATTN").builder
    common.max_seq_len = 64
    spec = AttentionSpec(32, 8, 128, torch.bfloat16, kv_cache_dtype="fp8_e4m3")

    def run():
        made = builder(get_backend("FLASH_ATTN"), [spec], 16, "cuda")
        captured = made.build_for_cudagraph_capture(common)
        return attention(q, cache, captured, 128**-0.5, **options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    for step in range(10):
        live = 8 - step % 4
        q.normal_(0, (0.1, 1.0, 3.0)[step % 3])
        common.seq_lens.copy_(torch.randint(1, 65, (8,)))
        common.seq_lens[live:] = 0
        common.seq_lens_cpu.copy_(common.seq_lens)  # the oracle reads it; no kernel does
        q[live:8] = float("nan")
        graph.replay()
        assert (out[live:] == 0).all()
        q[live:] = 0
        want = reference_attention(q, cache, common, 128**-0.5, **options)
        assert error(out, want) < 2 * WHOLE, "scores of wide queries are steeper"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_size", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_cache(causal, head_size, feature):
    asked = dict(FEATURES[feature])
    spec = AttentionSpec(4, 2, head_size, torch.bfloat16, causal=causal, **asked)
    if asked.pop("sinks", False):
        asked["sinks"] = torch.linspace(-2, 3, 4, device="cuda").bfloat16().float()
    lengths = [3, 0, 1, 300, 129]
    meta = varlen_metadata(lengths, spec, "cuda", num_padded_tokens=440, backend="FLASH_ATTN")
    q, k, v = (
        torch.randn(440, heads, head_size, device="cuda", dtype=torch.bfloat16)
        for heads in (4, 2, 2)
    )
    for x in (q, k, v):
        x[433:] = float("nan")
    out = varlen_attention(q, k, v, meta, head_size**-0.5, **asked)
    reference = varlen_metadata(lengths, spec, "cuda", num_padded_tokens=440, backend="TORCH")
    want = varlen_attention(q.double(), k.double(), v.double(), reference, head_size**-0.5, **asked)
    assert error(out, want) < 1.5e-2
    assert (out[433:] == 0).all()
