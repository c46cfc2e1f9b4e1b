"""Batch metadata on a GPU: no function reads the device, and what is captured replays right."""

import contextlib
import dataclasses
import random

import numpy as np
import pytest
import torch

from attn_ops.backends import get_backend
from attn_ops.metadata import (
    AttentionSpec,
    CommonAttentionMetadata,
    MetadataBuffers,
    UBatchSlice,
    advance_step,
    compute_causal_conv1d_metadata,
    create_fast_prefill_custom_backend,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    positions_and_slots,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    slice_query_start_locs,
    split_attn_metadata,
    split_decodes_and_prefills,
)
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import NUM_BLOCKS, Ragged, int32, int64, read_batch

pytestmark = pytest.mark.gpu

ON_HOST = {"query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu", "logits_indices_cpu"}
BLOCK = 4


@contextlib.contextmanager
def no_sync():
    """Any call that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_cuda(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch with its device tensors on the GPU and its mirrors where they are."""
    moved = {
        field.name: value.cuda()
        for field in dataclasses.fields(common)
        if isinstance(value := getattr(common, field.name), torch.Tensor)
        and field.name not in ON_HOST | {"seq_lens_cpu_upper_bound"}
    }
    return dataclasses.replace(common, **{"seq_lens": moved["seq_lens"], **moved})


def random_batches(count: int, seed: int) -> list[Ragged]:
    generator = random.Random(seed)
    return [read_batch(generator.randbytes(56)) for _ in range(count)]


def assert_same(got: CommonAttentionMetadata, want: CommonAttentionMetadata) -> None:
    for field in dataclasses.fields(want):
        ours, theirs = getattr(got, field.name), getattr(want, field.name)
        if isinstance(theirs, torch.Tensor):
            assert ours.tolist() == theirs.tolist(), field.name
            assert ours.dtype == theirs.dtype, field.name
            assert ours.is_cuda == (field.name not in ON_HOST), field.name
        else:
            assert ours == theirs, field.name


def test_no_sync_catches_a_read():
    """The other tests can fail: reading the device is seen."""
    with pytest.raises(RuntimeError, match="synchroniz"), no_sync():
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("table_on_gpu", [True, False])
@pytest.mark.parametrize("with_buffers", ["exact", "larger", ""])
def test_from_lengths(table_on_gpu, with_buffers):
    for b in random_batches(2000, 1):
        table = b.table_tensor().cuda() if table_on_gpu else b.table_tensor()
        padded = {"num_padded_tokens": b.num_rows, "num_padded_reqs": b.num_reqs + 1}
        out = None
        if with_buffers:
            more = 0 if with_buffers == "exact" else 20
            sizes = b.num_reqs + 1 + more, b.num_rows + more, b.width
            out = MetadataBuffers.allocate(*sizes, "cuda")
        with no_sync():
            got = CommonAttentionMetadata.from_lengths(
                b.query_lens, b.seq_lens, table, b.block_size, "cuda", out=out, **padded
            )
            got.validate(read_device=False)
        assert_same(
            got,
            CommonAttentionMetadata.from_lengths(
                b.query_lens, b.seq_lens, b.table_tensor(), b.block_size, **padded
            ),
        )
        got.validate(NUM_BLOCKS)
        if out is not None:
            if b.num_rows:
                assert got.slot_mapping.data_ptr() == out.slot_mapping.data_ptr()
            assert got.query_start_loc.data_ptr() == out.query_start_loc.data_ptr()


def test_validate_reads_the_device_when_asked():
    common = CommonAttentionMetadata.from_lengths([2], [5], int32([[1, 2]]), BLOCK, "cuda")
    common.seq_lens.add_(1)
    common.validate(read_device=False)
    with pytest.raises(ValueError, match=r"seq_lens_cpu must equal seq_lens"):
        common.validate()


def test_positions_and_slots():
    for b in random_batches(2000, 2):
        arguments = int32(b.starts), int32(b.seq_lens), b.table_tensor()
        on_gpu = [x.cuda() for x in arguments]
        with no_sync():
            got = positions_and_slots(*on_gpu, b.block_size, b.num_rows)
        assert [x.tolist() for x in got] == list(b.positions_and_slots)


def test_splits_and_slices():
    for b in random_batches(2000, 3):
        common = b.common(**b.logits_fields())
        device = on_cuda(common)
        middle_req, slices = b.num_reqs // 2, []
        middle_tok = b.starts[middle_req]
        for reqs, rows in (
            ((0, middle_req), (0, middle_tok)),
            ((middle_req, b.num_reqs), (middle_tok, b.num_tokens)),
        ):
            if reqs[0] < reqs[1] and rows[0] < rows[1]:
                slices.append(UBatchSlice(slice(*reqs), slice(*rows)))
        if b.num_reqs and b.query_lens[0] > 1:  # cut the first request in two
            slices.append(UBatchSlice(slice(0, 1), slice(0, 1)))
            slices.append(UBatchSlice(slice(0, 1), slice(1, b.query_lens[0])))
        with no_sync():
            got = split_attn_metadata(slices, device)
            starts = slice_query_start_locs(device.query_start_loc, slice(0, middle_req))
            counts = split_decodes_and_prefills(device, 2, True)
            unpadded = device.unpadded(middle_tok, middle_req)
            lengths = device.query_lens, device.num_computed_tokens
        for mine, want in zip(got, split_attn_metadata(slices, common), strict=True):
            assert_same(mine, want)
        assert starts.tolist() == b.starts[: middle_req + 1]
        assert counts == split_decodes_and_prefills(common, 2, True)
        assert_same(unpadded, common.unpadded(middle_tok, middle_req))
        assert [x.tolist() for x in lengths] == [b.query_lens, b.computed]


@pytest.mark.parametrize("on_device", [True, False])
def test_virtual_batches(on_device):
    for b in random_batches(2000, 4):
        common = b.common()
        device, chunk = on_cuda(common), b.block_size * (1 + b.tape.below(4))
        with no_sync():
            got = make_local_attention_virtual_batches(chunk, device, on_device=on_device)
        want = make_local_attention_virtual_batches(chunk, common, on_device=on_device)
        assert_same(got, want)


@pytest.mark.parametrize("known_on_host", [True, False])
def test_fast_prefill(known_on_host):
    for b in random_batches(2000, 5):
        common = b.common(**b.logits_fields(on_host=known_on_host))
        device = on_cuda(common)
        with no_sync():
            got = make_kv_sharing_fast_prefill_common_attn_metadata(device)
        want = make_kv_sharing_fast_prefill_common_attn_metadata(common)
        if known_on_host:
            assert_same(got, want)
            continue
        assert got.query_start_loc.tolist() == want.query_start_loc.tolist()
        assert got.max_query_len >= want.max_query_len
        assert got.num_actual_tokens == want.num_actual_tokens


def test_small_functions():
    for b in random_batches(2000, 6):
        starts = int32(b.starts)
        out = tuple(torch.empty(2048, dtype=torch.int32, device="cuda") for _ in range(2))
        on_gpu, query = starts.cuda(), torch.randn(6, 4, 8, device="cuda")
        with no_sync():
            _, *got = compute_causal_conv1d_metadata(on_gpu, query_start_loc_cpu=starts, out=out)
            uniform = reshape_query_for_spec_decode(query, 3)
            back = reshape_attn_output_for_spec_decode(uniform)
        _, *want = compute_causal_conv1d_metadata(starts)
        assert [x.tolist() for x in got] == [x.tolist() for x in want]
        assert torch.equal(back, query)
    with pytest.raises(ValueError, match="query_start_loc_cpu"):
        compute_causal_conv1d_metadata(starts.cuda())


@pytest.mark.parametrize("name", ["TRITON", "FLASH_ATTN"])
def test_builders(name):
    backend = get_backend(name)
    fast = create_fast_prefill_custom_backend("FastPrefill", backend)
    specs = [AttentionSpec(8, 2, 128, torch.bfloat16)]
    builders = [b.get_builder_cls()(b, specs, 16, "cuda") for b in (backend, fast)]
    common = CommonAttentionMetadata.from_lengths(
        [1, 40], [100, 90], int32([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14]]), 16, "cuda"
    )
    common.logits_indices_padded, common.num_logits_indices = int64([0, 40, 7]).cuda(), 2
    plain, reduced = builders
    plain.build(0, common)  # loads the library
    with no_sync():
        metadata = [
            plain.build(0, common),
            plain.build_for_cudagraph_capture(common),
            plain.build_for_drafting(common, 0),
            reduced.build(0, common),
        ]
    assert [m.common.num_actual_tokens for m in metadata] == [41, 41, 41, 2]
    assert metadata[3].common.query_start_loc.tolist() == [0, 1, 2]


def captured(run):
    """`run` once outside, then as a CUDA graph; what it returned while captured is static."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = run()
    return graph, result


@pytest.mark.parametrize("with_pages", [True, False])
def test_advance_step_replayed_64_times(with_pages):
    """Requests of all kinds: padding, full ones, ones that fill up, ones that pause."""
    generator = random.Random(7)
    seq = [0, 1, 3, 4, 5, 17, 50, 63, 64, 0, 40, 8]
    num_reqs, width = len(seq), 16  # room for 64 tokens
    table = [[1 + r * width + m for m in range(width)] for r in range(num_reqs)]
    state = {
        "input_tokens": [7] * num_reqs,
        "positions": [max(n - 1, 0) for n in seq],
        "seq_lens": seq,
        "slot_mapping": [-1] * num_reqs,
    }
    tensors = {
        name: (int32 if name == "seq_lens" else int64)(values).cuda()
        for name, values in state.items()
    }
    sampled = int64([0] * num_reqs).cuda()
    active = torch.ones(num_reqs, dtype=torch.bool, device="cuda")
    pages = {}
    if with_pages:
        pages = {
            "paged_kv_indptr": int32([0] * (num_reqs + 1)).cuda(),
            "paged_kv_indices": int32([0] * num_reqs * width).cuda(),
            "paged_kv_last_page_len": int32([0] * num_reqs).cuda(),
        }
    table_gpu = int32(table).cuda()

    def run():
        advance_step(
            sampled, **tensors, block_table=table_gpu, block_size=BLOCK, active=active, **pages
        )

    initial = {name: tensor.clone() for name, tensor in tensors.items()}
    graph, _ = captured(run)
    for name, tensor in tensors.items():
        tensor.copy_(initial[name])
    for _ in range(64):
        ids = [generator.randrange(1000) for _ in range(num_reqs)]
        runs = [generator.random() < 0.9 for _ in range(num_reqs)]
        sampled.copy_(int64(ids))
        active.copy_(torch.tensor(runs))
        with no_sync():
            graph.replay()
        state = brute_force.advance(state, ids, table, BLOCK, runs)
        for name, tensor in tensors.items():
            assert tensor.tolist() == state[name], name
        if with_pages:
            indptr, indices, last = brute_force.pages(state["seq_lens"], table, BLOCK)
            assert pages["paged_kv_indptr"].tolist() == indptr
            assert pages["paged_kv_indices"][: len(indices)].tolist() == indices
            assert pages["paged_kv_last_page_len"].tolist() == last
    assert state["seq_lens"].count(64) > 3
    assert state["seq_lens"][0] == 0


def captured_batch(num_reqs: int, num_rows: int, width: int) -> CommonAttentionMetadata:
    """A padded batch in buffers of its own, maxima as bounds."""
    out = MetadataBuffers.allocate(num_reqs, num_rows, width, "cuda")
    for tensor in (out.lengths, out.block_table, out.slot_mapping, out.positions):
        tensor.zero_()
    return CommonAttentionMetadata(
        query_start_loc=out.query_start_loc, query_start_loc_cpu=None, seq_lens=out.seq_lens,
        num_reqs=num_reqs, num_actual_tokens=num_rows, max_query_len=13, max_seq_len=64,
        block_table_tensor=out.block_table, slot_mapping=out.slot_mapping,
        positions=out.positions, block_size=BLOCK,
        logits_indices_padded=torch.zeros(18, dtype=torch.int64, device="cuda"),
        num_logits_indices=18, num_logits=torch.zeros(1, dtype=torch.int32, device="cuda"),
    )  # fmt: skip


def test_step_captured_and_replayed_with_other_batches():
    """Positions, slots, virtual batches and fast prefill of a padded batch, in one graph."""
    num_reqs, num_rows, width, chunk = 7, 80, 14, 2 * BLOCK
    common = captured_batch(num_reqs, num_rows, width)

    def run():
        positions_and_slots(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, BLOCK, num_rows,
            positions=common.positions, slot_mapping=common.slot_mapping,
        )  # fmt: skip
        local = make_local_attention_virtual_batches(chunk, common, on_device=True)
        return local, make_kv_sharing_fast_prefill_common_attn_metadata(common)

    graph, (local, reduced) = captured(run)
    for b in random_batches(64, 8):
        table = [[row[m] if m < len(row) else 0 for m in range(width)] for row in b.table]
        table += [[0] * width] * (num_reqs - b.num_reqs)
        padding = [0] * (num_reqs - b.num_reqs)
        query = b.query_lens + padding
        # Lengths that the captured table has room for.
        seq = [q + min(c, width * BLOCK - q) for q, c in zip(b.query_lens, b.computed, strict=True)]
        seq += padding
        starts = brute_force.starts(query)
        common.query_start_loc.copy_(int32(starts))
        common.seq_lens.copy_(int32(seq))
        common.block_table_tensor.copy_(int32(table))
        rows = b.logits_rows
        common.logits_indices_padded.copy_(int64(rows + [3] * (18 - len(rows))))
        common.num_logits.fill_(len(rows))
        with no_sync():
            graph.replay()
        positions, slots = brute_force.positions_and_slots(query, seq, table, BLOCK, num_rows)
        assert common.positions.tolist() == positions
        assert common.slot_mapping.tolist() == slots
        want = brute_force.virtual_batches(query, seq, table, chunk, BLOCK)
        lens = np.diff(local.query_start_loc.cpu().numpy()).tolist()
        surplus = local.num_reqs - len(want)
        assert surplus >= 0
        assert lens == [q for q, _, _ in want] + [0] * surplus
        assert local.seq_lens.tolist() == [k for _, k, _ in want] + [0] * surplus
        blocks = [row for _, _, row in want] + [[0] * (chunk // BLOCK)] * surplus
        assert local.block_table_tensor.tolist() == blocks
        counts = brute_force.queries_with_logits(query, rows)
        assert reduced.query_start_loc.tolist() == brute_force.starts(counts)
