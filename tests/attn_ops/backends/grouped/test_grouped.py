"""Layers of one step on different backends: routed by geometry, checked against the oracle.

T tokens, N query heads, K kv heads, H head size.
"""

import dataclasses

import numpy as np
import pytest
import torch

from attn_ops import (
    AttentionOptions,
    attention,
    attention_with_lse,
    get_backend,
    grouped_backend,
    register_backend,
    varlen_attention,
    write_kv,
)
from attn_ops.backends import registry
from attn_ops.backends.flex import flex_backend
from attn_ops.backends.grouped import levels, runs_on
from attn_ops.testing import make_case
from attn_ops.testing.calls import chunked_oracle
from attn_ops.testing.features import FEATURES, LENGTHS
from tests.attn_ops.backends.flex.masks import check as check_custom
from tests.attn_ops.backends.flex.masks import oracle
from tests.attn_ops.backends.grouped.grouped_layers import (
    CAPPED,
    CHUNKED,
    FLEX,
    FULL,
    LAYERS,
    SCALE,
    SLIDING,
    TORCH,
    Level,
    built,
    check,
    is_sliding,
    mixed_batch,
    three_groups,
)
from tests.kit.marks import slow


@pytest.fixture
def three():
    return three_groups()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_three_groups_in_one_batch(make_batch, three, name, compiled):
    batch = mixed_batch(make_batch, name)

    def layers(q, kv_cache, meta):
        plain = [attention(q, kv_cache, meta, SCALE, **options) for options in LAYERS.values()]
        both = [attention_with_lse(q, kv_cache, meta, SCALE, **o) for o in LAYERS.values()]
        return plain, both

    if compiled:
        layers = torch.compile(layers, backend="aot_eager", fullgraph=True, dynamic=True)
    plain, both = layers(batch.q, batch.kv_cache, built(three, batch.common))
    for out, (again, lse), options in zip(plain, both, LAYERS.values(), strict=True):
        check(out, None, batch, options)
        check(again, lse, batch, options)


@pytest.mark.slow
def test_one_graph_serves_every_batch(make_batch, three, num_graphs):
    layer = torch.compile(
        lambda q, c, m: attention(q * 1, c, m, SCALE, sliding_window=9),
        fullgraph=True,
        dynamic=True,
    )
    before = num_graphs()
    for name in ("mixed", "prefill", "uniform"):
        batch = mixed_batch(make_batch, name)
        out = layer(batch.q, batch.kv_cache, built(three, batch.common))
        check(out, None, batch, LAYERS[SLIDING])
    assert num_graphs() == before + 1


def test_every_group_runs_its_own_layers(make_batch, monkeypatch):
    ran = []

    def watched(name):
        backend = get_backend(name)

        def forward(q, kv_cache, meta, options, *plan):
            ran.append((name, meta.backend.name))
            return backend.forward(q, kv_cache, meta, options, *plan)

        return dataclasses.replace(backend, forward=forward)

    backend = grouped_backend(
        {SLIDING: watched("FLEX"), CAPPED: watched("TORCH")}, default=watched("TRITON")
    )
    batch = mixed_batch(make_batch)
    meta = built(backend, batch.common)
    made = []
    monkeypatch.setattr(
        AttentionOptions,
        "spec",
        lambda self, *a, spec=AttentionOptions.spec: made.append(a) or spec(self, *a),
    )
    for _ in range(2):
        for options in LAYERS.values():
            attention(batch.q, batch.kv_cache, meta, SCALE, **options)
    assert ran == [(n, n) for n in ("TRITON", "FLEX", "TORCH")] * 2
    assert len(made) == 2 * len(LAYERS), "the check's and the routing's, once a step and layer"


def test_custom_mask_of_one_group(make_batch):
    """Rows of the sliding layers see every third key only."""
    mask = flex_backend("THIRDS", lambda request, query, key: (query - key) % 3 == 0)
    backend = grouped_backend({is_sliding: mask}, default="TRITON")
    assert backend.support.own_mask
    batch = mixed_batch(make_batch)
    meta = built(backend, batch.common, (FULL, SLIDING))
    check(attention(batch.q, batch.kv_cache, meta, SCALE), None, batch, {})
    found = attention_with_lse(batch.q, batch.kv_cache, meta, 0.3, sliding_window=9)
    nine = oracle(batch, {}, True, lambda r, q, k: ((q - k) % 3 == 0) & (q - k < 9))
    check_custom(*found, *nine)


@pytest.mark.parametrize("chunked_on", ["FLEX", "TRITON"])
def test_chunked_layers_have_a_group_of_their_own(chunked_on):
    """Without the chunk both layers have one geometry."""
    other = {"FLEX": "TRITON", "TRITON": "FLEX"}[chunked_on]
    backend = grouped_backend({CHUNKED: chunked_on}, default=other)
    case = make_case(TORCH, FULL, LENGTHS["mixed"], FEATURES["plain"])
    meta = built(backend, case.meta.common, (FULL, CHUNKED))
    assert runs_on(meta, CHUNKED).name == chunked_on
    assert runs_on(meta, FULL).name == other
    case.check(attention(case.q, case.kv_cache, meta, case.scale))
    out = attention(case.q, case.kv_cache, meta, case.scale, attention_chunk_size=32)
    want = chunked_oracle(case, 32)
    assert (out.double() - want).norm() <= 1e-5 * want.norm()


def test_geometries_that_only_one_group_takes(make_batch):
    """The default takes no head size 36; the operators ask before the group is known."""
    spec = dataclasses.replace(FULL, head_size=36)
    backend = grouped_backend({spec: "FLEX"}, default="TRITON")
    batch = make_batch(*LENGTHS["mixed"], head_size=36, block_size=16)
    meta = built(backend, batch.common, (FULL, spec))
    write_kv(batch.k, batch.v, batch.kv_cache, meta)
    check(attention(batch.q, batch.kv_cache, meta, SCALE), None, batch, {})
    assert select_reasons(backend, spec) == []
    (reason,) = select_reasons(backend, dataclasses.replace(spec, sliding_window=3))
    assert reason.startswith("TRITON: head_size must be supported, got 36")
    with pytest.raises(ValueError, match=r"backend TRITON cannot take these layers: head_size"):
        built(backend, batch.common, (spec, dataclasses.replace(spec, soft_cap=2.0)))


def select_reasons(backend, spec):
    return backend.reasons_against(spec, 16, torch.device("cpu"))


def test_layers_are_as_causal_as_the_batch(make_batch, three):
    batch = mixed_batch(make_batch, causal=False)
    meta = built(three, batch.common)
    for options in LAYERS.values():
        check(attention(batch.q, batch.kv_cache, meta, SCALE, **options), None, batch, options)


@pytest.mark.parametrize("default", ["TRITON", "TORCH"])
def test_cascade_is_the_groups_own(default):
    lengths = ([1, 1, 9, 4], [33, 65, 41, 72])
    case = make_case(TORCH, FULL, lengths, FEATURES["plain"], shared_prefix=2)
    sinks = dataclasses.replace(FULL, sinks=True)
    backend = grouped_backend({is_sliding: "FLEX", sinks: "FLEX"}, default=default)
    meta = built(backend, case.meta.common, (FULL, SLIDING, sinks), prefix=32)
    assert meta.plans[FULL].views.cascade is not None
    asked = {
        "plain": {},
        "sinks": {"sinks": torch.tensor([-1.0, 0.0, 0.5, 2.0])},
        "sliding": LAYERS[SLIDING],
    }
    for options in asked.values():
        layer = dataclasses.replace(case, options=options)
        out, lse = attention_with_lse(case.q, case.kv_cache, meta, case.scale, **options)
        layer.check(out, lse, least=1e-6)
    short = built(backend, case.meta.common, (FULL, SLIDING), prefix=3)
    assert short.plans[FULL].views.cascade is None


def test_cascade_is_refused_where_a_group_must_and_cannot(make_batch):
    mask = flex_backend("MASK", lambda request, query, key: key >= 0)
    batch = make_batch([1, 1], [20, 40], head_size=16, block_size=16)
    query_lens = np.full(16, 2, dtype=np.int32)
    arguments = (512, query_lens, 4, 2, False, False, False, 132)
    for layers, able in ((is_sliding, True), (CAPPED, False)):
        backend = grouped_backend({layers: mask}, default="TRITON")
        builder = backend.builder(backend, list(LAYERS), 16, "cpu")
        assert builder.use_cascade_attention(*arguments) is able
        assert builder.use_cascade_attention(*arguments[:-1], num_sms=132) is able
        if able:
            assert builder.build(16, batch.common).plans[SLIDING].backend is mask
            continue
        with pytest.raises(ValueError, match="common_prefix_len must be 0 with the mask"):
            builder.build(16, batch.common)
    backend = grouped_backend({is_sliding: "FLEX"}, default="TRITON")
    assert not backend.builder(backend, [SLIDING], 16, "cpu").use_cascade_attention(*arguments)


@pytest.mark.parametrize(
    ("groups", "options", "match"),
    [
        ({}, {}, "groups must be a mapping of layers to backends, got {}"),
        ({"sliding": "FLEX"}, {}, "groups must be keyed by layers, got 'sliding'"),
        ({SLIDING: "NO_SUCH"}, {}, "backend must be a known name, got 'NO_SUCH'"),
        ({SLIDING: 3}, {}, "backend of a group must be an ordinary one or its name, got 3"),
        ({SLIDING: "FLEX"}, {"name": "FLEX"}, "names of backend and groups must differ"),
        ({SLIDING: dataclasses.replace(TORCH, name="TRITON")}, {}, "names of backend and groups"),
        (
            {SLIDING: grouped_backend({SLIDING: "FLEX"}, default="TORCH")},
            {},
            "backend of a group must be an ordinary one",
        ),
    ],
)
def test_refused_groups(groups, options, match):
    with pytest.raises(ValueError, match=match):
        grouped_backend(groups, default="TRITON", **options)


def test_block_sizes_must_meet():
    only_8 = dataclasses.replace(
        TORCH, name="EIGHT", support=dataclasses.replace(TORCH.support, block_sizes=(8,))
    )
    with pytest.raises(ValueError, match=r"block_sizes of groups must have one in common"):
        grouped_backend({SLIDING: only_8}, default="TRITON")
    backend = grouped_backend({SLIDING: "TORCH"}, default="TRITON")
    assert backend.support.block_sizes == get_backend("TRITON").support.block_sizes


def test_refused_calls(make_batch, three):
    batch = mixed_batch(make_batch)
    meta = built(three, batch.common)
    with pytest.raises(ValueError, match="layer must be one that the builder of backend GROUPED"):
        attention(batch.q, batch.kv_cache, meta, SCALE, sliding_window=8)
    with pytest.raises(ValueError, match="backend GROUPED cannot attend without a KV cache"):
        varlen_attention(batch.q, batch.k, batch.v, meta, SCALE)
    silent = dataclasses.replace(
        TORCH, name="SILENT", support=dataclasses.replace(TORCH.support, lse=False)
    )
    backend = grouped_backend({SLIDING: silent}, default="TRITON")
    meta = built(backend, batch.common)
    check(*attention_with_lse(batch.q, batch.kv_cache, meta, SCALE), batch, {})
    with pytest.raises(ValueError, match="backend SILENT cannot return the log-sum-exp"):
        attention_with_lse(batch.q, batch.kv_cache, meta, SCALE, sliding_window=9)
    out = attention(batch.q, batch.kv_cache, meta, SCALE, sliding_window=9)
    check(out, None, batch, LAYERS[SLIDING])


def test_unavailable_group(three):
    gone = dataclasses.replace(FLEX, name="GONE", unavailable=lambda: "no library")
    backend = grouped_backend({is_sliding: gone}, default="TORCH")
    assert select_reasons(backend, SLIDING) == ["GONE: no library"]
    assert select_reasons(backend, FULL) == []


@pytest.mark.parametrize(
    ("family", "compiled", "options"),
    [
        ("gemma2", False, {"cudagraph_mode": "NONE"}),
        *slow(
            ("gemma3", False, {"cudagraph_mode": "PIECEWISE", "debug": "eager_replay"}),
            ("gemma2", True, {"cudagraph_mode": "NONE"}),
        ),
    ],
)
def test_session_generates_the_same_tokens(make_model, monkeypatch, family, compiled, options):
    from graphs import DecodeSession

    monkeypatch.setattr(registry, "_registered", {})
    backend = grouped_backend({is_sliding: "FLEX"}, default="TORCH", name="GEMMA")
    register_backend(backend)
    prompts = [[3], [5, 9], list(range(1, 18)), [1, 2, 3, 4]]
    results = []
    for name in ("TORCH", "GEMMA"):
        model = make_model(family)
        if compiled:
            model.compile(backend="aot_eager", dynamic=True)
        session = DecodeSession(model, max_batch_size=3, max_tokens=64, backend=name, **options)
        assert session.backend_selection.backend.name == name
        results.append([r.token_ids for r in session.generate(prompts, max_new_tokens=6)])
    assert results[0] == results[1]
    assert levels(backend, session.specs) == {"FLEX": Level.NEVER, "TORCH": Level.NEVER}
