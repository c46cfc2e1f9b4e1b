"""FLASHINFER's captured steps on a CPU: what is planned before a replay, and into which memory.

A replay is the forward of the same metadata: the wrappers of `fake.py` read their buffers
when they run, as a graph's kernels do.
"""

import dataclasses

import numpy as np
import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention
from attn_ops.backends.flashinfer.parts import divide_captured, page_indices
from attn_ops.backends.flashinfer.wrappers import graph_bytes
from attn_ops.backends.torch_backend import reference_attention
from tests.attn_ops.backends.flashinfer.fake import BLOCK, Event, Paged, builder_of, check, install

SPEC = AttentionSpec(8, 2, 64, torch.float32)
WIDTH = 5
SCALE = 0.3


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    install(monkeypatch)


def step(seq):
    """A decode step's common; padding requests have a row, and nothing of use in their table."""
    table = (torch.randperm(len(seq) * WIDTH) + 1).view(len(seq), WIDTH).int()
    rows, lens = [1] * len(seq), torch.tensor(seq, dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths(rows, [max(1, n) for n in seq], table, BLOCK)
    common.block_table_tensor[lens == 0] = -7
    return common.replace(
        seq_lens=lens, seq_lens_cpu=lens.clone(), num_computed_tokens_cpu=None,
        max_seq_len=WIDTH * BLOCK,
    )  # fmt: skip


def filled(common, spec=SPEC):
    """q and a cache for it, both NaN wherever no request has tokens, in the null block too."""
    size = common.num_reqs
    num_blocks = max(size * WIDTH, int(common.block_table_tensor.max())) + 1
    cache = torch.full((num_blocks, 2, BLOCK, spec.num_kv_heads, spec.head_size), np.nan)
    for blocks, length in zip(common.block_table_tensor, common.seq_lens.tolist(), strict=True):
        for begin in range(0, length, BLOCK):
            part = cache[blocks[begin // BLOCK], :, : length - begin]
            part.copy_(torch.randn(part.shape))
    q = torch.randn(size, spec.num_heads, spec.head_size)
    q[common.seq_lens == 0] = np.nan
    return q, cache


def check_replay(meta, common, spec=SPEC):
    """Run the captured layers on what `common` holds, and compare."""
    q, cache = filled(common, spec)
    options = {"sliding_window": spec.sliding_window, "soft_cap": spec.soft_cap}
    check(q, cache, meta, SCALE, common, **options)
    assert (attention(q, cache, meta, SCALE, **options)[common.seq_lens == 0] == 0).all()


REPLAYS = (
    [1, 17, 40, 80],
    [80, 16, 0, 0],
    [1, 0, 33, 0],
    [0, 5, 0, 64],
    [0, 0, 0, 0],
    [3, 3, 3, 3],
)


def test_replays_with_other_lengths_tables_and_padding():
    builder = builder_of(SPEC)
    meta = builder.prepare_capture(step([0] * 4))
    (wrapper,) = Paged.made
    addresses = [buffer.data_ptr() for buffer in wrapper.buffers.values()]
    for seq in REPLAYS:
        common = step(seq)
        builder.prepare_replay(meta, common)
        check_replay(meta, common)
    assert Paged.made == [wrapper]
    assert Paged.planned == [("decode", 4)] * (1 + len(REPLAYS))
    assert [buffer.data_ptr() for buffer in wrapper.buffers.values()] == addresses


def test_sizes_and_geometries_of_one_builder():
    """Sizes take turns; a geometry has a wrapper a size, over page arrays that they share."""
    windowed = dataclasses.replace(SPEC, sliding_window=7, soft_cap=5.0)
    builder = builder_of(SPEC, windowed)
    metas = {size: builder.prepare_capture(step([0] * size)) for size in (1, 2, 4)}
    assert len(Paged.made) == 6
    generator = torch.Generator().manual_seed(0)
    for size in (4, 1, 2, 4, 4, 1):
        common = step(torch.randint(0, WIDTH * BLOCK + 1, (size,), generator=generator).tolist())
        builder.prepare_replay(metas[size], common)
        for spec in (SPEC, windowed, SPEC):
            check_replay(metas[size], common, spec)
    ints = [paged.workspaces[1].data_ptr() for paged in Paged.made]
    assert len(set(ints)) == 6, "plans of one step and of several sizes stand beside each other"
    for first, second in zip(Paged.made[::2], Paged.made[1::2], strict=True):
        assert first.buffers.values() != second.buffers.values()
        for name, buffer in first.buffers.items():
            assert buffer.data_ptr() == second.buffers[name].data_ptr()


def test_an_uncaptured_step_between_replays():
    builder = builder_of(SPEC)
    meta, common = builder.prepare_capture(step([0, 0])), step([20, 50])
    builder.prepare_replay(meta, common)
    other = step([7, 70])
    check_replay(builder.build(0, other), other)
    check_replay(meta, common)


def test_chunked_layers():
    """Virtual batches of a decode are as many as its requests; the layers of both kinds replay."""
    chunk = 2 * BLOCK
    chunked = dataclasses.replace(SPEC, attention_chunk_size=chunk)
    builder = builder_of(SPEC, chunked)
    meta = builder.prepare_capture(step([0] * 3))
    for seq in ([1, 32, 33], [80, 0, 64], [0, 0, 7]):
        common = step(seq)
        builder.prepare_replay(meta, common)
        check_replay(meta, common)
        q, cache = filled(common)
        out = attention(q, cache, meta, SCALE, attention_chunk_size=chunk)
        for row, length in enumerate(seq):
            if not length:
                assert (out[row] == 0).all()
                continue
            last = (length - 1) // chunk * chunk  # the query's chunk begins there
            table = common.block_table_tensor[row : row + 1, last // BLOCK :]
            own = step([length - last]).replace(block_table_tensor=table)
            want = reference_attention(q[row : row + 1], cache, own, SCALE)
            torch.testing.assert_close(out[row : row + 1].double(), want, rtol=1e-5, atol=1e-5)


def test_a_plan_waits_until_the_last_one_is_copied(monkeypatch):
    """FlashInfer would overwrite the pinned arrays that the device has yet to read."""
    builder = builder_of(SPEC)
    meta = builder.prepare_capture(step([5, 9]))
    builder.prepare_replay(meta, step([6, 10]))
    assert Event.waits == 0
    monkeypatch.setattr(Event, "done", False)
    builder.prepare_replay(meta, step([7, 11]))
    assert Event.waits == 1
    other = builder.prepare_capture(step([1]))
    assert Event.waits == 1, f"{other} has pinned memory of its own"


def test_a_plan_that_the_graph_would_not_run_is_an_error(monkeypatch):
    builder = builder_of(SPEC)
    meta = builder.prepare_capture(step([5, 9]))
    plan = Paged.plan

    def another(self, **given):
        plan(self, **given)
        self._plan_info[0] += 1

    monkeypatch.setattr(Paged, "plan", another)
    with pytest.raises(AssertionError, match="must fit the recorded launches"):
        builder.prepare_replay(meta, step([6, 10]))


def test_no_plan_in_a_capture(monkeypatch):
    builder = builder_of(SPEC)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="prepare_capture must be called before the capture"):
        builder.build_for_cudagraph_capture(step([5]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    common = step([5, 9])
    check_replay(builder.build_for_cudagraph_capture(common), common)


def test_padding_requests_without_rows():
    """As `from_lengths` pads: requests past the last have no query, rows past it are padding."""
    starts = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    common = step([5, 9, 0, 0]).replace(query_start_loc=starts, query_start_loc_cpu=starts)
    meta = builder_of(SPEC).prepare_capture(common)
    q, cache = filled(common)
    check(q, cache, meta, SCALE, common)


def test_pages_of_random_batches():
    """Requests without tokens have no pages, the others their own blocks."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        size = int(rng.integers(1, 9))
        seq = np.where(rng.random(size) < 0.4, 0, rng.integers(1, WIDTH * BLOCK + 1, size))
        common = step(seq.tolist())
        part = divide_captured(common, BLOCK)
        indices = page_indices(common, part.pages.stop, BLOCK).tolist()
        want = []
        for length, blocks in zip(seq, common.block_table_tensor.tolist(), strict=True):
            want += blocks[: -(-length // BLOCK)]
        assert indices == want
        assert part.seq_lens.tolist() == seq.tolist()
        assert part.page_start_loc.diff().tolist() == (-(-seq // BLOCK)).tolist()


@pytest.mark.slow
def test_a_larger_size_gets_a_larger_workspace():
    """The graphs of smaller ones keep the one that they were captured with."""
    builder = builder_of(SPEC)
    small = builder.prepare_capture(step([5]))
    builder.prepare_capture(step([5] * 400))
    first, second = (paged.workspaces[0] for paged in Paged.made)
    assert first.numel() < second.numel()
    common = step([9])
    builder.prepare_replay(small, common)
    check_replay(small, common)


@pytest.mark.parametrize("num_reqs", [1, 33, 256, 1000])
@pytest.mark.parametrize(("heads", "tile"), [((32, 8), 16), ((4, 4), 16), ((64, 1), 64)])
def test_workspace_of_a_captured_batch(num_reqs, heads, tile):
    """FlashInfer's plan with graphs enabled: padded tiles, rows of a tile, heads, head size."""
    spec = AttentionSpec(*heads, 128, torch.bfloat16)
    rounded = -(-num_reqs * heads[0] // heads[1] // tile)
    tiles = max(2 * 132 // heads[1], rounded + num_reqs - 1)
    outputs, sums = (heads[0] * tiles * tile * n * 4 for n in (128, 1))
    assert graph_bytes(spec, 132, num_reqs) >= outputs + sums
