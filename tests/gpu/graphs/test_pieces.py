"""Steps captured in pieces on a GPU: replays with other batches equal the step run eagerly.

T tokens.
"""

import functools
import gc

import pytest
import torch

import fx_passes
from attn_ops import (
    PAD_SLOT_ID,
    AttentionSpec,
    CommonAttentionMetadata,
    PagedKVCache,
    attention,
    attention_with_lse,
    get_backend,
)
from attn_ops.compat.cuda_driver import Status, driver
from attn_ops.integrations.transformers import attention_specs, dynamic_batch
from graphs.capture.piecewise import CUDASegments, PiecewiseGraph, record_parts
from graphs.capture.pool import GraphPool
from tests.gpu.test_session import VOCAB, tiny_llama

pytestmark = pytest.mark.gpu

ROWS, BLOCK, WIDTH = 32, 16, 20


def everything(call) -> bool:
    return True


@pytest.fixture(scope="module")
def segments():
    return CUDASegments(GraphPool())


@pytest.fixture(scope="module")
def models():
    torch._dynamo.reset()
    model = tiny_llama()
    return model, torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)


class Steps:
    """A model with the static tensors of a step of `rows` rows, its caches and its metadata."""

    def __init__(self, model, backend="TRITON", rows=ROWS):
        self.model, self.rows = model, rows
        self.specs = attention_specs(getattr(model, "_orig_mod", model))
        self.cache = PagedKVCache(self.specs, num_tokens=8192, block_size=BLOCK, device="cuda")
        backend = get_backend(backend)
        if why := backend.unavailable():
            pytest.skip(why)
        self.builder = backend.builder(backend, self.specs, BLOCK, "cuda")
        integers = functools.partial(torch.zeros, dtype=torch.int64, device="cuda")
        self.static = {"input_ids": integers(1, rows), "position_ids": integers(1, rows)}
        self.static["slot_mapping"] = integers(rows).fill_(PAD_SLOT_ID)
        self.logits = torch.zeros(rows, VOCAB, device="cuda")

    def set_batch(self, query_lens, seq_lens, seed):
        """Write a batch into the static tensors and a past into the caches; its metadata."""
        generator = torch.Generator("cuda").manual_seed(seed)
        for cache in self.cache.tensors:
            cache.normal_(generator=generator)
        blocks = torch.randperm(self.cache.num_blocks - 1, device="cuda", generator=generator) + 1
        table = blocks[: len(seq_lens) * WIDTH].view(-1, WIDTH).int().cpu()
        common = CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, BLOCK, "cuda", num_padded_tokens=self.rows
        )
        self.static["slot_mapping"].copy_(common.slot_mapping)
        self.static["input_ids"].random_(0, VOCAB, generator=generator)
        positions = [p for q, s in zip(query_lens, seq_lens, strict=True) for p in range(s - q, s)]
        self.static["position_ids"].zero_()
        self.static["position_ids"][0, : len(positions)] = torch.tensor(positions).cuda()
        return self.builder.build(0, common)

    def run(self, metadata):
        logits = self.model(
            **self.static, attn_metadata=metadata, kv_caches=self.cache.tensors, use_cache=False
        ).logits[0]
        self.logits.copy_(logits)

    def compile(self, metadata):
        fresh = {name: t.clone() for name, t in self.static.items()}
        with torch.no_grad(), dynamic_batch(**fresh):
            self.model(
                **fresh, attn_metadata=metadata, kv_caches=self.cache.tensors, use_cache=False
            )

    def record(self, segments, metadata):
        """The graph, and the bytes that it took."""
        run = functools.partial(self.run, metadata)
        with torch.no_grad():
            segments.warm_up(run)
            before = segments.num_bytes()
            graph = PiecewiseGraph(record_parts(run, segments, everything))
        return graph, segments.num_bytes() - before

    def check(self, graph, lengths, seed):
        metadata = self.set_batch(*lengths, seed=seed)
        before = [c.clone() for c in self.cache.tensors]
        with torch.no_grad():
            self.run(metadata)
        wanted = self.logits.clone(), [c.clone() for c in self.cache.tensors]
        for cache, old in zip(self.cache.tensors, before, strict=True):
            cache.copy_(old)
        self.logits.fill_(float("nan"))
        graph.replay(metadata)
        num_tokens = sum(lengths[0])
        assert torch.equal(self.logits[:num_tokens], wanted[0][:num_tokens])
        for cache, want in zip(self.cache.tensors, wanted[1], strict=True):
            assert torch.equal(cache[1:], want[1:])


def random_batch(generator, rows):
    """Query lengths and seq_lens: of single tokens, or mixed."""
    most = min(rows, 16)
    num_reqs = int(torch.randint(1, most + 1, (), generator=generator))
    query = torch.ones(num_reqs, dtype=torch.int64)
    if torch.rand((), generator=generator) < 0.5:
        extra = torch.randint(0, num_reqs, (rows - num_reqs,), generator=generator)
        query += extra[: int(torch.randint(0, len(extra) + 1, (), generator=generator))].bincount(
            minlength=num_reqs
        )
    past = torch.randint(0, WIDTH * BLOCK - rows, (num_reqs,), generator=generator)
    return query.tolist(), (query + past).tolist()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["TRITON", "FLASH_ATTN", "FLASHINFER"])
def test_random_batches_equal_eager(models, segments, backend, compiled):
    """Three sizes in one pool, replayed in any order, bit for bit."""
    generator = torch.Generator().manual_seed(4)
    recorded = []
    for rows in (ROWS, 8, 1):
        steps = Steps(models[compiled], backend, rows)
        metadata = steps.set_batch(*random_batch(generator, rows), seed=0)
        if compiled and rows == ROWS:
            steps.compile(metadata)
        graph, _ = steps.record(segments, metadata)
        assert graph.num_breaks == 4
        assert graph.num_segments == 5
        recorded.append((steps, graph))
    for i in range(60):
        steps, graph = recorded[int(torch.randint(0, 3, (), generator=generator))]
        steps.check(graph, random_batch(generator, steps.rows), seed=i)


def test_memory_does_not_grow_with_layers():
    """1,024 rows: q and the result of a layer take 1 MiB."""
    taken = []
    for layers in (2, 18):
        segments = CUDASegments(GraphPool())
        steps = Steps(tiny_llama(layers), rows=1024)
        metadata = steps.set_batch([1], [5], seed=0)
        gc.collect()
        torch.cuda.empty_cache()
        graph, num_bytes = steps.record(segments, metadata)
        taken.append(num_bytes)
        steps.check(graph, ([300, 1], [300, 90]), seed=1)
    assert taken[1] <= taken[0] + (4 << 20), taken


@pytest.mark.parametrize("where", ["first", "later"])
def test_a_failed_capture_leaves_stream_and_pool_usable(models, segments, where):
    """The host reads the device in the first segment, or behind the second call."""
    steps = Steps(models[0])
    metadata = steps.set_batch([4, 1], [9, 30], seed=0)
    kept, _ = steps.record(segments, metadata)
    layer = models[0].model.layers[0 if where == "first" else 2]

    def read(*_):
        if torch.cuda.is_current_stream_capturing():
            steps.logits.sum().item()

    handle = layer.register_forward_pre_hook(read)
    try:
        with pytest.raises(RuntimeError, match=r"captur"):
            steps.record(segments, metadata)
    finally:
        handle.remove()
    assert driver().status(segments.pool.stream.cuda_stream) is Status.NONE
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    steps.check(kept, ([1, 2], [40, 17]), seed=1)
    graph, _ = steps.record(segments, metadata)
    steps.check(graph, ([1, 2], [40, 17]), seed=2)
    steps.check(kept, ([6], [6]), seed=3)


@pytest.mark.parametrize("case", ["chunked", "cascade", "with_lse", "back to back"])
def test_every_kind_of_call(segments, case):
    chunk = 2 * BLOCK if case == "chunked" else None
    spec = AttentionSpec(8, 2, 64, torch.bfloat16, attention_chunk_size=chunk)
    backend = get_backend("TRITON")
    builder = backend.builder(backend, [spec], BLOCK, "cuda")
    q = torch.randn(8, 8, 64, dtype=torch.bfloat16, device="cuda")
    kv_cache = torch.randn(41, 2, BLOCK, 2, 64, dtype=torch.bfloat16, device="cuda")
    table = (torch.arange(40, dtype=torch.int32) + 1).view(2, 20)
    table[1, :2] = table[0, :2]
    out = torch.zeros(8, 8, 64, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(8, 8, device="cuda")

    def build(query_lens, seq_lens):
        common = CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, BLOCK, "cuda", num_padded_tokens=8
        )
        return builder.build(2 * BLOCK if case == "cascade" else 0, common)

    def run(meta):
        if case == "with_lse":
            x, y = attention_with_lse(q * 2, kv_cache, meta, 0.1)
            lse.copy_(y)
        else:
            x = attention(q * 2, kv_cache, meta, 0.1, attention_chunk_size=chunk)
        if case == "back to back":
            x = attention(x, kv_cache, meta, 0.1)
        out.copy_(x)

    first, then = build([1, 1], [40, 50]), build([5, 3], [77, 300])
    segments.warm_up(lambda: run(first))
    graph = PiecewiseGraph(record_parts(lambda: run(first), segments, everything))
    assert (graph.num_breaks, graph.num_segments) == ((2, 2) if case == "back to back" else (1, 2))
    q.normal_()
    graph.replay(then)
    got = out.clone(), lse.clone()
    run(then)
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)
