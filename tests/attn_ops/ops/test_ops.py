"""The operators: schemas, the two forms of the KV write, and what is refused.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import gc
import itertools
import math
import weakref

import pytest
import torch

from attn_ops import (
    PAD_SLOT_ID,
    AttentionOptions,
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
    attention_with_lse,
    get_backend,
    grouped_backend,
    mla_attention,
    varlen_metadata,
    write_kv,
    write_mla_kv,
)
from tests.kit.batches import build_metadata
from tests.kit.latent import build_latent_batch
from tests.kit.operators import bits, opcheck

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SPEC_16 = AttentionSpec(4, 2, 16, torch.float32)
RAGGED = ([3, 0, 1, 1], [7, 5, 1, 9])  # query lengths and seq_lens
ops = torch.ops.attn_ops


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths", [RAGGED, ([1], [4]), ([0], [0])], ids=["ragged", "one", "empty"]
)
def test_opcheck_attention(make_batch, dtype, lengths):
    b = make_batch(*lengths, dtype=dtype, num_padding_rows=2)
    opcheck(ops.attention.default, (b.q, b.kv_cache, b.meta, 0.3))
    opcheck(
        ops.attention.default,
        (b.q, b.kv_cache, b.meta, 0.3),
        {"sliding_window": 3, "soft_cap": 2.0},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [RAGGED, ([1], [4])], ids=["ragged", "one"])
def test_opcheck_write_kv(make_batch, dtype, lengths):
    b = make_batch(*lengths, dtype=dtype, num_padding_rows=2)
    cache = torch.zeros_like(b.kv_cache)
    opcheck(ops.write_kv.default, (b.k, b.v, cache, b.meta))
    opcheck(
        ops.write_kv.default, (b.k, b.v, cache, b.meta), {"slot_mapping": b.common.slot_mapping}
    )


def test_opcheck_slot_mapping(make_batch):
    for lengths in (RAGGED, ([1], [4]), ([0], [0])):
        b = make_batch(*lengths, num_padding_rows=1)
        opcheck(ops.slot_mapping.default, (b.meta, b.k.shape[0], torch.device("cpu")))


def test_slot_mapping_refuses_another_number_of_tokens(make_batch):
    b = make_batch(*RAGGED)
    assert torch.equal(ops.slot_mapping(b.meta, 5, torch.device("cpu")), b.common.slot_mapping)
    with pytest.raises(ValueError, match="slot_mapping must have 4 entries, one a token, got 5"):
        ops.slot_mapping(b.meta, 4, torch.device("cpu"))


def test_opcheck_of_strided_queries(make_batch):
    """The fake says the strides of the result, which is contiguous."""
    b = make_batch(*RAGGED)
    turned = b.q.transpose(0, 1).contiguous().transpose(0, 1)
    for q in (turned, torch.cat([b.q, b.q], dim=1)[:, 4:]):
        opcheck(ops.attention.default, (q, b.kv_cache, b.meta, 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("lengths", "num_padding_rows"), [(RAGGED, 0), (RAGGED, 3), (([0], [3]), 4)]
)
def test_write_reaches_its_slots(make_batch, dtype, compiled, lengths, num_padding_rows):
    """And nothing else: padding lands in slot 0 of the null block."""
    b = make_batch(*lengths, dtype=dtype, num_padding_rows=num_padding_rows, written=False)
    wanted = b.kv_cache.clone()
    for row, slot in enumerate(b.common.slot_mapping.tolist()):
        if slot != PAD_SLOT_ID:
            wanted[slot // 4, 0, slot % 4], wanted[slot // 4, 1, slot % 4] = b.k[row], b.v[row]
    write = torch.compile(write_kv, backend="aot_eager", fullgraph=True) if compiled else write_kv
    for slots in (None, b.common.slot_mapping):
        cache = b.kv_cache.clone()
        write(b.k, b.v, cache, b.meta, slot_mapping=slots)
        assert torch.equal(bits(cache[1:]), bits(wanted[1:]))
        assert num_padding_rows or torch.equal(bits(cache[0]), bits(b.kv_cache[0]))
        assert torch.equal(bits(cache[0, :, 1:]), bits(b.kv_cache[0, :, 1:]))


WRONG_WRITES = {
    "k dtype": ("k", lambda b: b.k.double(), "^k must have the cache's dtype .*32, got .*64"),
    "v dtype": ("v", lambda b: b.v.half(), "^v must have the cache's dtype .*32, got .*16"),
    "k rank": ("k", lambda b: b.k[0], "^k must have shape"),
    "k batched": ("k", lambda b: b.k[None], "^k must have shape"),
    "v rank": ("v", lambda b: b.v.flatten(1), "^v must have shape"),
    "k heads": (
        "k",
        lambda b: b.k[:, :1],
        r"^k must have .* \[num_tokens, 2, 8\], got \[5, 1, 8\]",
    ),
    "v heads": ("v", lambda b: b.v[:, :1], "^v must have shape"),
    "k head size": ("k", lambda b: b.k[..., :1], "^k must have shape"),
    "rows": ("v", lambda b: b.v[:1], r"^v must have the shape of k \[5, 2, 8\], got \[1, 2, 8\]"),
    "slots": ("slot_mapping", lambda b: b.common.slot_mapping[:1], r"must be int64 of shape \[5\]"),
    "slot rank": (
        "slot_mapping",
        lambda b: b.common.slot_mapping[:, None],
        "^slot_mapping must be",
    ),
    "slot dtype": ("slot_mapping", lambda b: b.common.slot_mapping.int(), "^slot_mapping must be"),
    "cache rank": ("kv_cache", lambda b: b.kv_cache[0], "^kv_cache must have shape"),
    "cache halves": ("kv_cache", lambda b: b.kv_cache[:, :1], "^kv_cache must have shape"),
}


@pytest.mark.parametrize(
    ("case", "backend"),
    [*itertools.product(WRONG_WRITES, (None, "aot_eager")), ("k dtype", "inductor")],
)
def test_wrong_writes_are_refused_and_write_nothing(make_batch, case, backend):
    """Otherwise index_put_ broadcasts one head, row or number over all, and Inductor casts."""
    name, wrong, message = WRONG_WRITES[case]
    b = make_batch(*RAGGED, written=False)
    before = b.kv_cache.clone()
    arguments = {"k": b.k, "v": b.v, "kv_cache": b.kv_cache, "slot_mapping": b.common.slot_mapping}
    write, error = write_kv, ValueError
    if backend is not None:  # what is raised in tracing comes out wrapped
        write, error = torch.compile(write_kv, backend=backend, fullgraph=True), Exception
        message = "must|shape|dtype|index"
    with pytest.raises(error, match=message):
        write(**arguments | {name: wrong(b)}, meta=b.meta)
    assert torch.equal(bits(b.kv_cache), bits(before))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda b: b.q[0]}, r"^q must have shape \[num_tokens, .*\], got \[4, 8\]"),
        ({"kv_cache": lambda b: b.kv_cache[0]}, "^kv_cache must have shape"),
        ({"kv_cache": lambda b: b.kv_cache[:, :1]}, "^kv_cache must have shape"),
        ({"q": lambda b: b.q[..., :4]}, "^q must have the cache's head size 8, got 4"),
        ({"q": lambda b: b.q[:, :3]}, "^q must have a multiple of 2 heads, got 3"),
        ({"q": lambda b: b.q[:4]}, "^q must have at least 5 rows, got 4"),
        ({"sliding_window": lambda b: 0}, "^sliding_window must be"),
        ({"sliding_window": lambda b: -1}, "^sliding_window must be"),
        ({"soft_cap": lambda b: 0.0}, "^soft_cap must be"),
        ({"soft_cap": lambda b: math.inf}, "^soft_cap must be"),
        ({"q": lambda b: b.q[:, :0]}, "^q must have a multiple of 2 heads, got 0"),
        ({"kv_cache": lambda b: b.kv_cache[:, :, :, :0]}, "^kv_cache must have shape"),
        ({"q": lambda b: b.q[0, 0, 0], "v_head_size": lambda b: 4}, "^q must have shape"),
        ({"v_head_size": lambda b: 9}, "^v_head_size must be from 1 to q's head size 8, got 9"),
        ({"sinks": lambda b: torch.zeros(8)[::2]}, "^sinks must be contiguous, got stride 2"),
    ],
)
def test_wrong_attention_is_refused(make_batch, change, message):
    b = make_batch(*RAGGED)
    arguments = {"q": b.q, "kv_cache": b.kv_cache} | {
        name: make(b) for name, make in change.items()
    }
    q, kv_cache = arguments.pop("q"), arguments.pop("kv_cache")
    with pytest.raises(ValueError, match=message):
        attention(q, kv_cache, b.meta, 1.0, **arguments)


@pytest.mark.parametrize("compiled", [False, True])
def test_metadata_without_a_cache_is_refused(make_batch, compiled):
    b = make_batch(*RAGGED)
    meta = varlen_metadata([3, 1, 1], AttentionSpec(4, 2, 8, torch.float32))
    attend = torch.compile(attention, backend="aot_eager") if compiled else attention
    for call in (
        lambda: write_kv(b.k, b.v, b.kv_cache, meta),
        lambda: attend(b.q, b.kv_cache, meta, 1.0),
    ):
        with pytest.raises(ValueError, match=r"^meta must be that of a paged batch"):
            call()


@pytest.mark.parametrize("compiled", [False, True])
def test_causality_must_be_the_batchs(make_batch, compiled):
    b = make_batch(*RAGGED)
    for operator in (attention, attention_with_lse):
        attend = torch.compile(operator, backend="aot_eager") if compiled else operator
        attend(b.q, b.kv_cache, b.meta, 1.0, causal=True)
        with pytest.raises(ValueError, match=r"^attn_metadata must be non-causal.*got causal"):
            attend(b.q, b.kv_cache, b.meta, 1.0, causal=False)


@pytest.mark.parametrize("compiled", [False, True])
def test_narrow_values_with_the_log_sum_exp(make_batch, compiled):
    b = make_batch(*RAGGED)
    attend = attention_with_lse
    attend = torch.compile(attend, backend="aot_eager") if compiled else attend
    out, lse = attend(b.q, b.kv_cache, b.meta, 0.3, v_head_size=4, soft_cap=5.0)
    full, wanted = attention_with_lse(b.q, b.kv_cache, b.meta, 0.3, soft_cap=5.0)
    assert torch.equal(out, full[..., :4])
    assert torch.equal(lse, wanted)


def test_cache_of_another_block_size_is_refused_and_not_written(make_batch):
    b = make_batch(*RAGGED)
    cache = torch.zeros(4, 2, 8, 2, 8)
    for call in (
        lambda: write_kv(b.k, b.v, cache, b.meta),
        lambda: attention(b.q, cache, b.meta, 1.0),
    ):
        with pytest.raises(ValueError, match="must have the metadata's block_size 4, got 8"):
            call()
    assert not cache.any()


def test_attention_across_devices_is_refused(make_batch):
    from attn_ops.ops.checks import layer_of

    b = make_batch(*RAGGED)
    for q, kv_cache in ((b.q.to("meta"), b.kv_cache), (b.q, b.kv_cache.to("meta"))):
        with pytest.raises(ValueError, match=r"^q, kv_cache and attn_metadata must be on one"):
            layer_of(q, kv_cache, b.meta, AttentionOptions(1.0))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_step_is_freed_with_its_last_reference(grouped):
    """Its plans hold memory of the device: they must not wait for the garbage collector."""
    backend = get_backend("TORCH")
    if grouped:
        backend = grouped_backend({lambda s: s.sliding_window is not None: "FLEX"}, default=backend)
    specs = [AttentionSpec(4, 2, 16, torch.float32, sliding_window=w) for w in (None, 3)]
    specs.append(AttentionSpec(4, 2, 16, torch.float32, attention_chunk_size=16))
    common = CommonAttentionMetadata.from_lengths([1, 2], [17, 20], [[1, 2], [1, 3]], 16)
    common.logits_indices = torch.arange(3)
    builder = backend.builder(backend, specs, 16, "cpu")
    q, cache = torch.randn(3, 4, 16), torch.randn(4, 2, 16, 2, 16)
    gc.collect()
    gc.disable()
    try:
        for prefix in (0, 16):
            meta = builder.build(prefix, common)
            for options in ({}, {"sliding_window": 3}, {"attention_chunk_size": 16}):
                attention(q, cache, meta, 0.25, **options)
            if not prefix:
                attention(q, cache, meta, 0.25, logits_rows=True)
            write_kv(torch.zeros(3, 2, 16), torch.zeros(3, 2, 16), cache, meta)
            seen = weakref.ref(meta)
            del meta
            assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ["TORCH", "TRITON", "FLEX"])
@pytest.mark.parametrize("block", [99, -1])
def test_blocks_beyond_the_cache_are_refused(make_batch, backend, block):
    b = make_batch(*RAGGED, head_size=16, block_size=16, backend=get_backend(backend))
    table = b.common.block_table_tensor.clone()
    table[0, 0] = block
    meta = build_metadata(backend, b.common.replace(block_table_tensor=table), SPEC_16)
    with pytest.raises(ValueError, match=rf"block_table_tensor must hold.*\[0\]\[0\]={block}"):
        attention(b.q, b.kv_cache, meta, 0.3)


def test_latent_blocks_and_slots_beyond_the_cache_are_refused():
    b = build_latent_batch(*RAGGED)
    table, slots = b.common.block_table_tensor.clone(), b.common.slot_mapping + 999
    table[3, 0] = 99
    common, before = b.common.replace(block_table_tensor=table), b.kv_cache.clone()
    meta = build_metadata(b.meta.backend, common, list(b.meta.plans), 4)
    with pytest.raises(ValueError, match=r"block_table_tensor must hold.*\[3\]\[0\]=99"):
        mla_attention(b.q, b.kv_cache, meta, *b.arguments[3:], **b.keywords)
    with pytest.raises(ValueError, match="slot_mapping must hold -1 or slots from 0 to"):
        write_mla_kv(b.kv_c, b.k_pe, b.kv_cache, b.meta, slot_mapping=slots)
    assert torch.equal(bits(b.kv_cache), bits(before))


@pytest.mark.parametrize("slot", [-2, 10**6])
def test_slots_beyond_the_cache_are_refused(make_batch, slot):
    b = make_batch(*RAGGED)
    slots, before = b.common.slot_mapping.clone(), b.kv_cache.clone()
    slots[1] = slot
    with pytest.raises(ValueError, match=f"slot_mapping must hold -1 or slots from 0 to.*{slot}"):
        write_kv(b.k, b.v, b.kv_cache, b.meta, slot_mapping=slots)
    assert torch.equal(bits(b.kv_cache), bits(before))
