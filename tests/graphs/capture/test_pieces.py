"""Steps recorded in pieces and replayed with another batch equal the same step run eagerly.

T tokens, N query heads, H head size.
"""

import collections
import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch

from attn_ops import (
    PAD_SLOT_ID,
    AttentionSpec,
    CommonAttentionMetadata,
    PagedKVCache,
    attention,
    attention_with_lse,
    get_backend,
)
from attn_ops.integrations.transformers import attention_specs
from fx_passes.config import PassConfig
from fx_passes.pipeline import run_dynamo_stage
from fx_passes.regions import compile_regions
from graphs.capture.piecewise import PiecewiseGraph, record_parts
from tests.graphs.capture.tape import TapeSegments

ROWS = 12  # of a padded step
BLOCK = 4
BATCHES = {  # query lengths and seq_lens
    "decode": ([1, 1, 1, 1, 1], [3, 17, 1, 9, 24]),
    "mixed": ([5, 1, 1, 4], [5, 20, 2, 13]),
    "one": ([1], [7]),
    "full": ([12], [12]),
    "with empty": ([3, 0, 1], [9, 4, 8]),
}


def everything(call) -> bool:
    return True


def recorded(run, cut=everything, segments=None) -> PiecewiseGraph:
    return PiecewiseGraph(record_parts(run, segments or TapeSegments(), cut))


class Steps:
    """A model with the static tensors of a padded step, its caches and its metadata."""

    def __init__(self, model, fast=None):
        self.model, self.fast = model, model if fast is None else fast
        self.specs = attention_specs(model)
        self.cache = PagedKVCache(self.specs, num_tokens=256, block_size=BLOCK)
        self.static = {
            "input_ids": torch.zeros(1, ROWS, dtype=torch.int64),
            "position_ids": torch.zeros(1, ROWS, dtype=torch.int64),
            "slot_mapping": torch.full((ROWS,), PAD_SLOT_ID),
        }
        self.logits = torch.zeros(ROWS, 64)
        self.backend = get_backend("TORCH")

    def set_batch(self, query_lens, seq_lens, seed):
        """Write a batch into the static tensors and a past into the caches; its metadata."""
        generator = torch.Generator().manual_seed(seed)
        for cache in self.cache.tensors:
            cache.normal_(generator=generator)
            cache[0] = float("nan")
        blocks = torch.randperm(self.cache.num_blocks - 1, generator=generator) + 1
        width = 6
        table = blocks[: len(seq_lens) * width].view(-1, width).int()
        common = CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, BLOCK, num_padded_tokens=ROWS
        )
        self.static["slot_mapping"].copy_(common.slot_mapping)
        ids = torch.randint(1, 64, (1, ROWS), generator=generator)
        self.static["input_ids"].copy_(ids)
        positions = [p for q, s in zip(query_lens, seq_lens, strict=True) for p in range(s - q, s)]
        self.static["position_ids"].zero_()
        self.static["position_ids"][0, : len(positions)] = torch.tensor(positions)
        builder = self.backend.builder(self.backend, self.specs, BLOCK, "cpu")
        return builder.build(0, common)

    def run(self, metadata, model):
        logits = model(
            **self.static, attn_metadata=metadata, kv_caches=self.cache.tensors, use_cache=False
        ).logits[0]
        self.logits.copy_(logits)

    def record(self, metadata, cut=everything):
        segments = TapeSegments()
        run = functools.partial(self.run, metadata, self.fast)
        with torch.no_grad():
            segments.warm_up(run)
            graph = recorded(run, cut, segments)
        assert segments.num_bytes() > 0
        return graph

    def check(self, graph, lengths, seed, exact=True):
        """A replay leaves the logits and caches that an eager step leaves."""
        metadata = self.set_batch(*lengths, seed=seed)
        before = [c.clone() for c in self.cache.tensors]
        with torch.no_grad():
            self.run(metadata, self.model)
        wanted = self.logits.clone(), [c.clone() for c in self.cache.tensors]
        for cache, old in zip(self.cache.tensors, before, strict=True):
            cache.copy_(old)
        self.logits.fill_(float("nan"))
        graph.replay(metadata)
        num_tokens = sum(lengths[0])
        close = functools.partial(
            torch.testing.assert_close, atol=0 if exact else 1e-5, rtol=0 if exact else 1e-5
        )
        close(self.logits[:num_tokens], wanted[0][:num_tokens])
        for cache, want, old in zip(self.cache.tensors, wanted[1], before, strict=True):
            close(cache[1:], want[1:])
            assert not torch.equal(cache[1:], old[1:]), "nothing was written"


CALLED = collections.Counter()  # pieces of `by_layer`


def by_layer(gm, inputs):
    """The regions of fx_passes, a piece a region, run by AOTAutograd."""
    from torch._dynamo.backends.debugging import aot_eager

    def compile_piece(piece, inputs, name):
        compiled, name = aot_eager(piece, inputs), len(CALLED)
        CALLED[name] = 0

        def run(*args):
            CALLED[name] += 1
            return compiled(*args)

        return run

    CALLED.clear()
    run_dynamo_stage(gm, PassConfig())
    return compile_regions(gm, inputs, compile_piece)


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *itertools.product(["llama", "gemma2", "gpt_oss"], [None, by_layer]),
        ("llama", "aot_eager"),
        pytest.param("gemma2", "aot_eager", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_replays_with_other_batches_equal_eager(make_model, family, backend):
    model = make_model(family, num_layers=3)
    fast = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    steps = Steps(model, fast)
    graph = steps.record(steps.set_batch(*BATCHES["mixed"], seed=0))
    assert (graph.num_breaks, graph.num_segments) == (3, 4)
    for seed, lengths in enumerate(BATCHES.values()):
        steps.check(graph, lengths, seed + 1, exact=backend is None)
    if backend is by_layer and family == "llama":
        # Warm-up and recording; one piece for all three layers, and no call by a replay.
        assert sorted(CALLED.values()) == [2, 2, 6]


def test_the_tape_would_notice_frozen_lengths(make_model):
    """Whole steps on one tape attend over the recording's batch: the checks above can fail."""
    steps = Steps(make_model())
    graph = steps.record(steps.set_batch(*BATCHES["mixed"], seed=0), cut=lambda call: False)
    assert (graph.num_breaks, graph.num_segments) == (0, 1)
    with pytest.raises(AssertionError):
        steps.check(graph, BATCHES["decode"], seed=1)


def test_only_a_weak_groups_layers_are_broken_out(make_model):
    """Gemma 2: every other layer has a window. Those in the graph read the recording's metadata."""
    steps = Steps(make_model("gemma2", num_layers=4))
    seen = []

    def windowed(call):
        seen.append(call.spec)
        return call.spec.sliding_window is not None

    metadata = steps.set_batch(*BATCHES["decode"], seed=0)
    graph = steps.record(metadata, windowed)
    assert seen == steps.specs
    assert (graph.num_breaks, graph.num_segments) == (2, 3)
    common = metadata.common

    # The static batch: what the builder makes of the same tensors, with other lengths in them.
    lengths = BATCHES["decode"][0], [8, 3, 24, 5, 1]
    new = steps.set_batch(*lengths, seed=1).common
    for name in ("seq_lens", "seq_lens_cpu", "block_table_tensor"):
        getattr(common, name).copy_(getattr(new, name))
    steps.check(graph, lengths, seed=1)


@pytest.mark.parametrize("case", ["chunked", "cascade", "with_lse", "strided q", "options"])
def test_every_kind_of_call(make_batch, case):
    batch = make_batch([1, 3, 2], [18, 14, 11], num_padding_rows=2)
    other = make_batch([2, 1, 1], [12, 9, 10], num_padding_rows=4)
    table = batch.common.block_table_tensor
    if case == "cascade":
        table[:, :2] = table[0, :2]
    common = dataclasses.replace(other.common, block_table_tensor=table)
    batch.q.nan_to_num_()
    chunk = 2 * BLOCK if case == "chunked" else None
    spec = AttentionSpec(4, 2, 8, torch.float32, attention_chunk_size=chunk)
    backend = get_backend("TORCH")
    builder = backend.builder(backend, [spec], BLOCK, "cpu")
    batch.meta = builder.build(0, batch.common)
    out, lse = torch.zeros(batch.q.shape), torch.zeros(batch.q.shape[:2])
    keywords: dict[str, Any] = {"attention_chunk_size": chunk}
    if case == "options":
        keywords = {"sliding_window": 5, "soft_cap": 3.0, "sinks": torch.randn(4), "causal": True}

    def run(meta):
        q = batch.q * 2
        if case == "strided q":
            q = torch.cat([q, q + 1], dim=1)[:, 2:6]
        if case == "with_lse":
            x, y = attention_with_lse(q, batch.kv_cache, meta, 0.3)
            lse.copy_(y)
        else:
            x = attention(q, batch.kv_cache, meta, 0.3, **keywords)
        out.copy_(x + 1)

    def build():
        return builder.build(2 * BLOCK if case == "cascade" else 0, common)

    if case == "cascade":
        assert build().views.cascade is not None
    graph = recorded(lambda: run(batch.meta))
    assert (graph.num_breaks, graph.num_segments) == (1, 2)
    new, result = build(), lse if case == "with_lse" else out
    graph.replay(new)
    got = result.clone()
    run(new)
    assert torch.equal(got, result)
    num_tokens = 4
    assert not got[:num_tokens].isnan().any()
    assert got[:num_tokens].unique().numel() > num_tokens


def test_calls_are_made_outside_of_the_recording(make_batch):
    """Not at all: the hook's results have no values before the first replay."""
    batch, ran = make_batch([1, 1], [5, 7]), []
    forward = batch.meta.backend.forward
    spy = dataclasses.replace(
        batch.meta.backend, forward=lambda *a: ran.append(None) or forward(*a)
    )
    batch.meta.backend = spy
    graph = recorded(lambda: attention(batch.q, batch.kv_cache, batch.meta, 0.3).sum())
    assert not ran
    graph.replay(batch.meta)
    assert len(ran) == 1


def test_empty_segments_are_dropped(make_batch):
    batch = make_batch([1, 1], [5, 7])
    out = torch.zeros_like(batch.q)

    def run():
        first = attention(batch.q, batch.kv_cache, batch.meta, 0.3)
        out.copy_(attention(first, batch.kv_cache, batch.meta, 0.3))

    graph = recorded(run)
    assert (graph.num_breaks, graph.num_segments) == (2, 1)
    graph.replay(batch.meta)
    got = out.clone()
    run()
    assert torch.equal(got, out)


def test_wrong_metadata_is_refused(make_batch):
    batch = make_batch([1, 1], [5, 7])
    graph = recorded(lambda: attention(batch.q, batch.kv_cache, batch.meta, 0.3).add_(1))
    with pytest.raises(ValueError, match=r"^metadata must be an AttentionMetadata, got dict"):
        graph.replay({})  # type: ignore
    with pytest.raises(ValueError, match=r"^q must have at least 3 rows, got 2"):
        graph.replay(make_batch([2, 1], [5, 7]).meta)
