"""`varlen_attention` and chunked local attention: schemas, refusals, compiled use.

What they compute is tested by tests/conformance, for every backend.
"""

from dataclasses import replace

import pytest
import torch

from attn_ops import AttentionSpec, attention, get_backend, varlen_attention, varlen_metadata
from attn_ops.metadata import AttentionMetadata
from tests.kit.batches import build_metadata
from tests.kit.operators import opcheck

ops = torch.ops.attn_ops
SPEC = AttentionSpec(4, 2, 8, torch.float32, causal=False)


def inputs(meta, rows=7, v_head_size=8):
    generator = torch.Generator().manual_seed(3)
    sizes = ((4, 8), (2, 8), (2, v_head_size))
    q, k, v = (torch.randn(rows, *size, generator=generator) for size in sizes)
    return q, k, v, meta, 0.3


@pytest.mark.parametrize("lengths", [[3, 0, 1, 2], [1], []], ids=["ragged", "one", "none"])
@pytest.mark.parametrize("v_head_size", [8, 4])
def test_opcheck(lengths, v_head_size):
    meta = varlen_metadata(lengths, SPEC, num_padded_tokens=7)
    opcheck(ops.varlen_attention.default, inputs(meta, v_head_size=v_head_size))


def test_opcheck_of_chunks(make_batch):
    b = make_batch([3, 1], [7, 5], num_padding_rows=1)
    spec = AttentionSpec(4, 2, 8, torch.float32, attention_chunk_size=8)
    meta = build_metadata("TORCH", b.common, spec, 4)
    opcheck(ops.attention.default, (b.q, b.kv_cache, meta, 0.3), {"attention_chunk_size": 8})
    with pytest.raises(ValueError, match="sliding_window must be None with attention_chunk_size"):
        attention(b.q, b.kv_cache, meta, 0.3, attention_chunk_size=8, sliding_window=3)


def test_one_graph_for_all_batches(as_dynamic, num_graphs):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def encode(q, k, v, meta):
        return varlen_attention(q, k, v, meta, 0.3) * 2

    before = num_graphs()
    for index, lengths in enumerate(([3, 4], [1], [2, 2, 3], [7])):
        meta = varlen_metadata(lengths, SPEC)
        q, k, v, _, scale = inputs(meta, rows=sum(lengths))
        for tensor in (q, k, v) if index == 0 else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        with as_dynamic():
            out = encode(q, k, v, meta)
        torch.testing.assert_close(out, varlen_attention(q, k, v, meta, scale) * 2)
    assert num_graphs() == before + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(7, 4)}, "q must have shape"),
        (
            {name: torch.zeros(6, heads, 8) for name, heads in (("q", 4), ("k", 2), ("v", 2))},
            "q must have at least 7 rows on cpu, got 6",
        ),
        ({"k": torch.zeros(6, 2, 8)}, r"k must have shape \[7, num_kv_heads, 8\]"),
        ({"v": torch.zeros(7, 2, 8).double()}, "v must be torch.float32 on cpu as q"),
        ({"k": torch.zeros(7, 3, 8)}, "k and v must have one number of heads"),
        ({"q": torch.zeros(7, 0, 8)}, "k and v must have one number of heads"),
        ({"k": torch.zeros(7, 0, 8), "v": torch.zeros(7, 0, 8)}, "k and v must have one number"),
    ],
)
def test_refusals(change, message):
    meta = varlen_metadata([3, 4], SPEC)
    values = dict(zip(("q", "k", "v", "meta", "scale"), inputs(meta), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        varlen_attention(*values.values())


@pytest.mark.parametrize("compiled", [False, True])
def test_causality_must_be_the_batchs(compiled):
    attend = torch.compile(varlen_attention, backend="aot_eager") if compiled else varlen_attention
    call = inputs(varlen_metadata([3, 4], SPEC))
    torch.testing.assert_close(attend(*call, causal=False), varlen_attention(*call))
    with pytest.raises(ValueError, match=r"attn_metadata must be causal.*got non-causal"):
        attend(*call, causal=True)


@pytest.mark.parametrize(
    ("geometry", "more", "message"),
    [
        ({"attention_chunk_size": 16}, {}, "attention_chunk_size must be None without a KV cache"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "kv_cache_dtype must be auto without a KV cache"),
        ({}, {"device": "meta"}, r"TORCH.*device must be supported, got meta"),
        ({}, {"backend": "NOBODY"}, "^backend must be a known name, got 'NOBODY'"),
    ],
)
def test_metadata_that_cannot_be_had(geometry, more, message):
    with pytest.raises(ValueError, match=message):
        varlen_metadata([3], AttentionSpec(4, 2, 8, torch.float32, **geometry), **more)


def test_a_paged_batch_may_be_attended_without_its_cache(make_batch):
    b = make_batch([3, 4], [3, 4])
    call = inputs(b.meta)
    wanted = varlen_attention(*inputs(varlen_metadata([3, 4], replace(SPEC, causal=True))))
    torch.testing.assert_close(varlen_attention(*call), wanted)


def test_a_backend_without_it_is_refused():
    paged = get_backend("TORCH")
    common = varlen_metadata([3, 4], SPEC).common
    only_paged = type(paged)("PAGED", paged.support, paged.builder, paged.forward, lambda: None)
    with pytest.raises(ValueError, match="PAGED cannot attend without a KV cache"):
        varlen_attention(*inputs(AttentionMetadata(common, only_paged)))
