"""`mla_attention` and `write_mla_kv`: schemas, the two forms of the write, what is refused.

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent.
"""

import pytest
import torch

from attn_ops import (
    PAD_SLOT_ID,
    AttentionSpec,
    attention,
    grouped_backend,
    mla_attention,
    mla_attention_with_lse,
    write_kv,
    write_mla_kv,
)
from attn_ops.backends.grouped import runs_on
from attn_ops.ops.breaks import around_attention
from tests.kit.batches import build_batch, build_metadata
from tests.kit.latent import build_latent_batch
from tests.kit.operators import opcheck

RAGGED = ([3, 0, 1, 1], [7, 5, 1, 9])
ops = torch.ops.attn_ops
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mla_attention", "mla_attention_with_lse"])
def test_opcheck_mla_attention(name, dtype):
    for lengths in (RAGGED, ([1], [4]), ([0], [0])):
        b = build_latent_batch(*lengths, dtype=dtype, num_padding_rows=2)
        opcheck(getattr(ops, name).default, b.arguments, b.keywords)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_opcheck_write_mla_kv(kv_cache_dtype):
    for lengths in (RAGGED, ([1], [4])):
        b = build_latent_batch(*lengths, kv_cache_dtype=kv_cache_dtype, num_padding_rows=2)
        cache = torch.zeros_like(b.kv_cache)
        arguments = (b.kv_c, b.k_pe, cache, b.meta)
        opcheck(ops.write_mla_kv.default, arguments, {"kv_cache_dtype": kv_cache_dtype})


def rows_written(b, cache: torch.Tensor) -> torch.Tensor:
    """[T, Lkv + R]: what stands at the batch's slots."""
    return cache.flatten(0, 1)[b.common.slot_mapping.clamp(min=0)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_write(kv_cache_dtype, compiled):
    b = build_latent_batch(
        *RAGGED, kv_cache_dtype=kv_cache_dtype, num_padding_rows=1, written=False
    )
    scale = b.keywords.get("kv_scale")
    before = b.kv_cache.clone()

    def run(kv_c, k_pe, kv_cache, meta, slots):
        keywords = {"kv_cache_dtype": kv_cache_dtype, "scale": scale}
        write_mla_kv(kv_c, k_pe, kv_cache, meta, slot_mapping=slots, **keywords)

    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    run(b.kv_c, b.k_pe, b.kv_cache, b.meta, b.common.slot_mapping)
    want = torch.cat([b.kv_c, b.k_pe], -1)
    if scale is not None:
        fp8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_cache_dtype]
        want = (want / scale).to(fp8).view(torch.uint8)
    assert torch.equal(rows_written(b, b.kv_cache)[:5], want[:5])
    assert b.common.slot_mapping[5] == PAD_SLOT_ID
    touched = torch.zeros(b.kv_cache.shape[:2], dtype=torch.bool).flatten()
    touched[b.common.slot_mapping.clamp(min=0)] = True
    untouched = ~touched.view(b.kv_cache.shape[:2])
    bits = torch.int32 if kv_cache_dtype == "auto" else torch.uint8
    assert torch.equal(b.kv_cache.view(bits)[untouched], before.view(bits)[untouched])


REFUSED = {
    "kv_b's rows": ({"kv_b": torch.zeros(32, 16)}, "kv_b must have 33 rows"),
    "kv_b's dtype": ({"kv_b": torch.zeros(33, 16).half()}, "kv_b must have shape .* q's dtype"),
    "kv_b's columns": ({"kv_b": torch.zeros(33, 20)}, "qk_rope_head_dim must be at least 1"),
    "q": ({"q": torch.zeros(5, 30)}, "q must have shape"),
    "too few rows": ({"q": torch.zeros(4, 3, 10)}, "q must have at least 5 rows"),
    "another dtype": ({"kv_cache": torch.zeros(9, 4, 20).half()}, "q must have the cache's dtype"),
    "another block size": ({"kv_cache": torch.zeros(9, 8, 20)}, "block_size 4"),
    "a standard cache": ({"kv_cache": torch.zeros(9, 2, 4, 1, 20)}, "kv_cache must have shape"),
    "v_head_dim": ({"v_head_dim": 4}, "kv_b must have 30 rows"),
    "kv_scale": ({"kv_scale": torch.ones(2)}, "kv_scale must be"),
    "kv_cache_dtype": ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be known"),
    "causal": ({"causal": False}, "must be non-causal"),
    "meta": ({"meta": build_batch([1], [4]).meta}, "backend TORCH cannot run this layer: latent"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    changes, message = REFUSED[case]
    b = build_latent_batch(*RAGGED)
    names = ("q", "kv_cache", "meta", "kv_b", "scale")
    arguments = dict(zip(names, b.arguments, strict=True)) | b.keywords | changes
    with pytest.raises(ValueError, match=message):
        mla_attention(**arguments)


def test_standard_writes_refuse_latent_metadata():
    b, plain = build_latent_batch(*RAGGED), build_batch(*RAGGED)
    with pytest.raises(ValueError, match="latent must be a LatentShape, got None"):
        write_kv(plain.k, plain.v, plain.kv_cache, b.meta)


WRITES = {
    "rows": ({"k_pe": torch.zeros(4, 4)}, "k_pe must have two dimensions and as many rows"),
    "columns": ({"k_pe": torch.zeros(5, 5)}, "must have the 20 columns of the cache together"),
    "dtype": ({"kv_c": torch.zeros(5, 16).half()}, "kv_c must have the dtype of the cache"),
    "slots": ({"slot_mapping": torch.zeros(5).int()}, "slot_mapping must be int64"),
    "scale": ({"scale": torch.ones(1).half()}, "scale must be torch.float32"),
    "meta": ({"meta": build_batch(*RAGGED).meta}, "backend TORCH cannot run this layer: latent"),
}


@pytest.mark.parametrize("case", WRITES)
def test_writes_that_do_not_fit_are_refused(case):
    changes, message = WRITES[case]
    b = build_latent_batch(*RAGGED)
    before = b.kv_cache.clone().view(torch.int32)
    asked = {"kv_c": b.kv_c, "k_pe": b.k_pe, "kv_cache": b.kv_cache, "meta": b.meta} | changes
    with pytest.raises(ValueError, match=message):
        write_mla_kv(**asked)
    assert torch.equal(b.kv_cache.view(torch.int32), before)


@pytest.mark.parametrize("name", ["mla_attention", "mla_attention_with_lse", "mla_attention_quant"])
def test_hooks_see_a_call_of_latent_attention(name):
    b, seen = build_latent_batch(*RAGGED), []
    more = {"scheme": "fp8_row", "min_scale": 1e-6} if name == "mla_attention_quant" else {}

    def hook(call):
        results = call.empty_results()
        call.run_into(results)
        seen.append(call.spec)
        return results

    def run():
        results = getattr(ops, name)(*b.arguments, **b.keywords, **more)
        return [x.float() for x in (results if isinstance(results, tuple) else [results])]

    want = run()
    with around_attention(hook):
        assert all(map(torch.equal, run(), want))
    assert [s.latent for s in seen] == [b.shape]
    build_metadata("TORCH_MLA", b.common, seen, 4)  # it takes what the call says of itself


LOGITS = [
    ([3, 1, 20], [7, 4, 25], [2, 3, 23]),
    ([3, 1, 20], [7, 4, 25], [1, 2, 3, *range(10, 24)]),
    ([4], [9], [0, 1, 2, 3]),
    ([0, 6, 1], [0, 6, 2], [4, 5, 6]),
    ([3, 12], [7, 12], []),
]


@pytest.mark.parametrize(("query", "seq_lens", "rows"), LOGITS)
def test_logits_rows_are_those_of_the_whole_batch(query, seq_lens, rows):
    b = build_latent_batch(query, seq_lens, num_padding_rows=1)
    indices = torch.tensor(rows, dtype=torch.int64)
    known = {"logits_indices_padded": indices, "num_logits_indices": len(rows)}
    spec = AttentionSpec.of_latent(3, b.shape, torch.float32)
    meta = build_metadata("TORCH_MLA", b.common.replace(**known), spec, 4)
    whole, lse = mla_attention_with_lse(b.q, b.kv_cache, meta, b.kv_b, b.scale, **b.keywords)
    few = (b.q[rows], b.kv_cache, meta, b.kv_b, b.scale)
    out, few_lse = mla_attention_with_lse(*few, **b.keywords, logits_rows=True)
    torch.testing.assert_close(out, whole[rows], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(few_lse, lse[rows], atol=1e-5, rtol=1e-5)
    got = mla_attention(*few, **b.keywords, logits_rows=True)
    torch.testing.assert_close(got, whole[rows], atol=1e-5, rtol=1e-5)


def test_one_model_of_latent_and_standard_layers():
    """A grouped backend sends each to its own; both read one batch."""
    b = build_latent_batch([3, 1, 12], [7, 4, 20])
    standard = AttentionSpec(4, 2, 8, torch.float32)
    latent = AttentionSpec.of_latent(3, b.shape, torch.float32)
    both = grouped_backend({standard: "TORCH"}, default="TORCH_MLA")
    meta = build_metadata(both, b.common, [latent, standard], 4)
    out = mla_attention(b.q, b.kv_cache, meta, b.kv_b, b.scale, **b.keywords)
    assert torch.equal(out, mla_attention(*b.arguments, **b.keywords))
    plain = build_batch([3, 1, 12], [7, 4, 20])
    assert runs_on(meta, latent).name == "TORCH_MLA"
    got = attention(plain.q, plain.kv_cache, meta, 0.3)
    assert torch.equal(got, attention(plain.q, plain.kv_cache, plain.meta, 0.3))
