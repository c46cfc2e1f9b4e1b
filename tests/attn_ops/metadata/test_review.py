"""What a reviewer broke: memory shared with the caller, padding, odd arguments, large batches."""

import dataclasses

import numpy as np
import pytest
import torch

from attn_ops.metadata import (
    CommonAttentionMetadata,
    MetadataBuffers,
    PerLayerParameters,
    UBatchSlice,
    _make_metadata_with_slice,
    advance_step,
    compute_causal_conv1d_metadata,
    create_fast_prefill_custom_backend,
    get_per_layer_parameters,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    max_local_attention_virtual_batches,
    positions_and_slots,
    slice_query_start_locs,
)
from attn_ops.metadata.chunked_local import reference_virtual_batches
from attn_ops.metadata.fast_prefill import reference_logits_rows
from graphs.step.tensors import StepTensors
from tests.attn_ops.metadata.ragged import int32, int64

from_lengths = CommonAttentionMetadata.from_lengths


@pytest.fixture
def buffers() -> MetadataBuffers:
    out = MetadataBuffers.allocate(4, 8, 4)
    out.block_table.copy_(torch.arange(16).view(4, 4) + 100)
    return out


def test_a_table_in_place_is_used_in_place(buffers):
    got = from_lengths([1, 1], [1, 3], buffers.block_table[:2], 2, out=buffers)
    assert got.slot_mapping.tolist() == [200, 105 * 2]
    assert got.block_table_tensor.data_ptr() == buffers.block_table.data_ptr()
    assert buffers.block_table[2:].tolist() == (torch.arange(8, 16).view(2, 4) + 100).tolist()
    got = from_lengths([1], [1], buffers.block_table[:1], 2, num_padded_reqs=2, out=buffers)
    assert got.block_table_tensor.tolist() == [[100, 101, 102, 103], [0] * 4]


@pytest.mark.parametrize(
    "part",
    [
        (slice(None, None, 2), slice(None)),
        (slice(2, 4), slice(None)),
        (slice(2), slice(2, None)),
        (slice(2), slice(2)),
        (slice(1, 3), slice(None)),
    ],
)
def test_another_part_of_the_buffers_is_no_table(buffers, part):
    before = [t.clone() for t in (buffers.lengths, buffers.block_table, buffers.slot_mapping)]
    with pytest.raises(ValueError, match="block_table must be the first rows"):
        from_lengths([1, 1], [1, 1], buffers.block_table[part], 2, out=buffers)
    after = (buffers.lengths, buffers.block_table, buffers.slot_mapping)
    assert all(map(torch.equal, before, after))


def test_strided_tensors_are_refused():
    good = from_lengths([4, 10], [6, 12], torch.arange(20, dtype=torch.int32).view(2, 10), 2)
    strided = {
        "block_table_tensor": torch.arange(20, dtype=torch.int32).view(10, 2).t(),
        "query_start_loc": int32([[0, 4], [4, 17], [14, 0]])[:, 0],
        "logits_indices_padded": int64([[3, 0], [13, 1]])[:, 0],
    }
    for name, tensor in strided.items():
        with pytest.raises(ValueError, match=f"^{name} must have contiguous entries"):
            good.replace(**{name: tensor})
    with pytest.raises(ValueError, match="block_table must have contiguous"):
        dataclasses.replace(
            MetadataBuffers.allocate(2, 2, 2), block_table=strided["block_table_tensor"]
        )


def test_results_do_not_overwrite_the_batch_that_they_are_made_of():
    out = MetadataBuffers.allocate(8, 16, 8)
    common = from_lengths(
        [4, 10], [6, 12], torch.arange(16, dtype=torch.int32).view(2, 8), 2, out=out
    )
    with pytest.raises(ValueError, match="out must not be the buffers of the batch"):
        make_local_attention_virtual_batches(4, common, out=out)
    common.logits_indices_padded, common.num_logits_indices = int64([3, 13]), 2
    with pytest.raises(ValueError, match="out must not be the buffers of the batch"):
        make_kv_sharing_fast_prefill_common_attn_metadata(common, out=out)
    assert common.query_start_loc.tolist() == [0, 4, 14]


def test_micro_batches_and_logits_rows():
    common = from_lengths([1, 2], [5, 2], [[1, 2], [3, 4]], 4)
    whole = UBatchSlice(slice(0, 2), slice(0, 3))
    captured = common.replace(
        logits_indices_padded=int64([0, 2, 0, 0]), num_logits_indices=4, num_logits=int32([2])
    )
    got = _make_metadata_with_slice(whole, captured)
    assert got.logits_indices_padded is None, "how many count, only the device knows"
    assert got.num_logits_indices is None
    rows = int64([0, 2])
    known = common.replace(logits_indices=rows, logits_indices_padded=rows, num_logits_indices=2)
    got = _make_metadata_with_slice(whole, known)
    kept = (got.logits_indices, got.logits_indices_padded, got.logits_indices_cpu)
    assert [t.tolist() for t in kept] == [[0, 2]] * 3
    assert len({t.data_ptr() for t in (*kept, rows)}) == 4


def test_a_mirror_of_another_length():
    common = from_lengths([2, 3], [2, 3], [[1], [2]], 4).replace(
        logits_indices_padded=int64([0, 1, 2]), num_logits_indices=3, logits_indices_cpu=int64([0])
    )
    for use in (
        make_kv_sharing_fast_prefill_common_attn_metadata,
        CommonAttentionMetadata.validate,
    ):
        with pytest.raises(ValueError, match="logits_indices_cpu must have num_logits_indices=3"):
            use(common)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([5], [-(2**31)], [[1]], 4), "seq_lens"),
        (([1], [1], int64([[2**32 + 7]]), 4), "block_table"),
        (([1], [1], [[1.5]], 4), "block_table"),
        (([1], [1], [[1]], 4.0), "block_size"),
        (([2**31], [2**31], [[1]], 4), "query_lens"),
        (([[1]], [[1]], [[1]], 4), "query_lens"),
        (([2**30] * 2, [2**30] * 2, int32([[1], [1]]), 2**30), "query_lens"),
    ],
)
def test_from_lengths_refuses(arguments, name):
    with pytest.raises(ValueError, match=name):
        from_lengths(*arguments)


@pytest.mark.parametrize("name", ["num_padded_reqs", "num_padded_tokens"])
def test_paddings_are_ints(name):
    with pytest.raises(ValueError, match=f"{name} must be an int, got float"):
        from_lengths([1], [1], [[1]], 4, **{name: 2.0})


def test_tables_as_lists_and_arrays():
    ragged = from_lengths([1, 1], [1, 7], [[5], [6, 7]], 4)
    assert ragged.block_table_tensor.tolist() == [[5, 0], [6, 7]]
    assert ragged.slot_mapping.tolist() == [20, 30]
    array = from_lengths([1, 1], [1, 7], np.array([[5, 0], [6, 7]], dtype=np.int64), 4)
    assert array.slot_mapping.tolist() == [20, 30]
    assert from_lengths([], [], [], 4).block_table_tensor.shape == (0, 0)


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"])
def test_counts_are_ints(name):
    common = from_lengths([1, 2], [5, 2], [[1, 2], [3, 4]], 4)
    for value in (torch.tensor(2), 2.0, True):
        with pytest.raises(ValueError, match=f"^{name} must be an int"):
            common.replace(**{name: value})


def test_captured_padding_is_valid_and_has_no_tokens():
    step = StepTensors.allocate(4, 4, 2, torch.device("cpu"), query_len=1)
    step.upload()
    common = step.common(1, 8)
    common.validate(block_size=4)
    assert common.num_computed_tokens.tolist() == [0] * 4
    assert common.num_computed_tokens_cpu.tolist() == [0] * 4
    common.slot_mapping[2] = 5
    with pytest.raises(ValueError, match=r"slot_mapping must be -1 for requests .*\[2\]=5"):
        common.validate(block_size=4)


def test_padding_cut_in_two():
    common = from_lengths([3, 3], [9, 3], [[1, 2, 3], [0, 0, 0]], 4)
    for lens in (common.seq_lens, common.seq_lens_cpu):
        lens[1] = 0
    common.num_computed_tokens_cpu = int32([6, 0])
    parts = (slice(0, 4), slice(4, 6))
    for requests, tokens in zip((slice(0, 2), slice(1, 2)), parts, strict=True):
        got = _make_metadata_with_slice(UBatchSlice(requests, tokens), common)
        assert got.seq_lens[-1] == got.seq_lens_cpu[-1] == got.num_computed_tokens_cpu[-1] == 0


def test_validate_looks_at_sizes():
    common = from_lengths([1, 2], [5, 2], [[1, 2], [3, 4]], 4)
    for changes, name in (
        ({"positions": int64([9] * 7)}, "positions"),
        ({"encoder_seq_lens": [1, 2, 3]}, "encoder_seq_lens"),
        ({"logits_indices_padded": int64([0]), "num_logits_indices": 3}, "num_logits_indices"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must"):
            common.replace(**changes).validate()
    for arguments, name in (({"block_size": 8}, "block_size"), ({"num_blocks": 0}, "num_blocks")):
        with pytest.raises(ValueError, match=f"^{name} must"):
            common.validate(**arguments)


def test_what_is_written_stands_apart():
    common = from_lengths([1, 1], [5, 2], [[1, 2], [3, 4]], 4)
    both = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="must not share memory"):
        positions_and_slots(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, 4, 2,
            positions=both, slot_mapping=both,
        )  # fmt: skip
    with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
        positions_and_slots(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, 4, -1
        )
    indptr = int32([0, 0, 0])
    step = [int64([1, 2]), int64([0, 0]), int64([0, 0]), common.seq_lens, int64([0, 0])]
    with pytest.raises(ValueError, match=r"paged_kv_last_page_len.* must not share memory"):
        advance_step(
            *step, common.block_table_tensor, 4,
            paged_kv_indptr=indptr, paged_kv_last_page_len=indptr[1:],
        )  # fmt: skip
    assert common.seq_lens.tolist() == [5, 2]


def test_conv1d_refuses():
    starts, room = int32([0, 9, 20]), lambda **k: torch.zeros(2048, **{"dtype": torch.int32, **k})
    same = room()
    for out, match in (
        ((room(dtype=torch.float16), room()), "batch_ptr must have dtype"),
        ((room(), torch.zeros(2, 9, dtype=torch.int32)), "token_chunk_offset_ptr must have shape"),
        ((same, same), "must not share memory"),
    ):
        with pytest.raises(ValueError, match=match):
            compute_causal_conv1d_metadata(starts, out=out)
    with pytest.raises(ValueError, match="query_start_loc_p must never fall"):
        compute_causal_conv1d_metadata(int32([0, 9, 3]))
    with pytest.raises(ValueError, match="query_start_loc_cpu must have shape"):
        compute_causal_conv1d_metadata(starts, query_start_loc_cpu=int32([0, 9]))


@pytest.mark.parametrize("frozen", [False, True])
def test_fast_prefill_over_a_backend_of_classes(frozen):
    @dataclasses.dataclass(frozen=frozen)
    class Metadata:
        rows: int

    class Builder:
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return Metadata(common_attn_metadata.num_actual_tokens)

    class Backend:
        @staticmethod
        def get_builder_cls():
            return Builder

    backend = create_fast_prefill_custom_backend("Fast", Backend)
    common = from_lengths([3, 2], [3, 2], [[1], [2]], 4)
    common.logits_indices_padded, common.num_logits_indices = int64([2, 4, 0]), 2
    metadata = backend.get_builder_cls()().build(0, common)
    assert backend.__name__ == "FastBackend"
    assert (metadata.rows, metadata.num_logits_indices) == (2, 2)
    common.logits_indices_padded = int64([1, 4, 0])
    with pytest.raises(ValueError, match=r"must hold the last rows .*\[0\]=1 for row 2"):
        backend.get_builder_cls()().build(0, common)


def test_smaller_ones():
    for part in (slice(None, 2), slice(0, -1), slice(0, 9), slice(0, 2, 1)):
        with pytest.raises(ValueError, match="request_slice must"):
            slice_query_start_locs(int32([0, 1, 3]), part)
    layer = type("Layer", (), {"scale": 0.5, "sliding_window": 9})()
    assert get_per_layer_parameters({"a": layer}, ["a"])["a"] == PerLayerParameters(8, None, 0.5)
    with pytest.raises(ValueError, match="num_reqs must be at least 0"):
        max_local_attention_virtual_batches(4, -1, 5)
    common = from_lengths([1, 2], [5, 2], [[1, 2], [3, 4]], 4)
    with pytest.raises(ValueError, match="max_virtual_batches must be None"):
        make_local_attention_virtual_batches(4, common, max_virtual_batches=9)
    with pytest.raises(ValueError, match="max_virtual_batches must be at least"):
        make_local_attention_virtual_batches(4, common, on_device=True, max_virtual_batches=1)
    with pytest.raises(ValueError, match="attn_chunk_size must be a multiple"):
        make_local_attention_virtual_batches(2**31, common)
    common.logits_indices_padded, common.num_logits_indices = int64([0, 1, 2]), 3
    common.max_logits_per_req, common.query_start_loc_cpu = 50, None
    assert make_kv_sharing_fast_prefill_common_attn_metadata(common).max_query_len == 2


def random_lengths(num_reqs: int, longest: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(seed)
    query = generator.integers(0, longest + 1, num_reqs)
    seq = query + generator.integers(0, 40, num_reqs)
    seq[generator.random(num_reqs) < 0.1] = 0  # padding with rows of its own
    return int32(np.concatenate([[0], np.cumsum(query)]).tolist()), int32(seq.tolist())


@pytest.mark.parametrize(
    ("num_reqs", "chunk", "block_size", "surplus", "max_blocks"),
    [(0, 4, 2, 5, 3), (1, 16, 1, 600, 50), (300, 8, 4, 300, 20), (513, 4, 4, 0, 1),
     (5, 140, 1, 3, 7), (3, 8, 4, 2, 0)],
)  # fmt: skip
def test_virtual_batches_kernel(num_reqs, chunk, block_size, surplus, max_blocks):
    """Beyond every tile of the kernel: requests, virtual batches, blocks, surplus."""
    from attn_ops.metadata.triton.virtual_batches import launch_virtual_batches

    start, seq = random_lengths(num_reqs, 30, num_reqs)
    width = max_blocks + 3  # rows of the table need not be contiguous
    table = torch.arange(num_reqs * width, dtype=torch.int32).view(num_reqs, width)[:, :max_blocks]
    count = max_local_attention_virtual_batches(chunk, num_reqs, int(start[-1]), 30) + surplus
    results = []
    for fill in (reference_virtual_batches, launch_virtual_batches):
        shapes = ((count + 1,), (count,), (count, chunk // block_size))
        local = [torch.full(shape, 77, dtype=torch.int32) for shape in shapes]
        fill(chunk, block_size, start, seq, table, *local)
        results.append([t.tolist() for t in local])
    assert results[0] == results[1]


def test_virtual_batches_kernel_writes_every_entry_whatever_the_bound():
    from attn_ops.metadata.triton.virtual_batches import launch_virtual_batches

    local = [torch.full(shape, 77, dtype=torch.int32) for shape in ((4,), (3,), (3, 2))]
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    launch_virtual_batches(4, 2, int32([0, 4, 14, 19]), int32([6, 17, 9]), table, *local)
    assert local[0].tolist() == [0, 2, 4, 19]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("num_reqs", "num_rows"), [(0, 3), (1, 0), (300, 2500), (7, 1024)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_logits_rows_kernel(num_reqs, num_rows, on_device, dtype):
    from attn_ops.metadata.triton.logits_rows import launch_logits_rows

    start, _ = random_lengths(num_reqs, 12, num_rows)
    rows = torch.randint(-5, int(start[-1]) + 5, (num_rows,), dtype=dtype)
    for wanted in (0, num_rows // 2, num_rows, num_rows + 9):
        count = int32([wanted]) if on_device else wanted
        results = [torch.full_like(start, 77) for _ in range(2)]
        for compute, result in zip(
            (reference_logits_rows, launch_logits_rows), results, strict=True
        ):
            compute(start, rows, count, result)
        assert results[0].tolist() == results[1].tolist()
