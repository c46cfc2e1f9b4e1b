"""Programs of a causal convolution."""

import pytest
import torch

from attn_ops.metadata import PAD_SLOT_ID, compute_causal_conv1d_metadata
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import batches, check, int32


def assert_programs(got: tuple, query_lens: list[int]) -> None:
    nums_dict, batch_ptr, chunk_ptr = got
    requests, offsets = brute_force.conv1d_chunks(query_lens, 8)
    assert list(nums_dict) == [8]
    programs = nums_dict[8]
    assert programs["nums"].tolist() == [requests.count(r) for r in range(len(query_lens))]
    assert programs["tot"] == programs["mlist_len"] == len(requests)
    assert type(programs["tot"]) is type(programs["mlist_len"]) is int
    assert programs["mlist"].tolist() == requests
    assert programs["offsetlist"].tolist() == offsets
    assert programs["batch_ptr"] is batch_ptr
    assert programs["token_chunk_offset_ptr"] is chunk_ptr
    for pointer, values in ((batch_ptr, requests), (chunk_ptr, offsets)):
        assert pointer.dtype == torch.int32
        assert pointer[: len(values)].tolist() == values
        assert (pointer[len(values) :] == PAD_SLOT_ID).all()


@check(batches())
def test_causal_conv1d(batch):
    """Longer queries than elsewhere: times 1 to 4."""
    query_lens = [query * (1 + batch.tape.below(4)) for query in batch.query_lens]
    starts = brute_force.starts(query_lens)
    tensor, keywords = int32(starts), {}
    if batch.tape.below(3) == 2:
        size = len(brute_force.conv1d_chunks(query_lens, 8)[0]) + batch.tape.below(3)
        keywords["out"] = torch.full((2, size), 77, dtype=torch.int32).unbind()
    if batch.tape.below(2):
        keywords["query_start_loc_cpu"] = int32(starts)
    got = compute_causal_conv1d_metadata(tensor, **keywords)
    assert_programs(got, query_lens)
    if "out" in keywords:
        for given, pointer in zip(keywords["out"], got[1:], strict=True):
            assert given.data_ptr() == pointer.data_ptr()
    else:
        assert got[1].shape == got[2].shape == (2048,)
    assert tensor.tolist() == starts


def test_causal_conv1d_of_many_tokens():
    """More than 1024 programs: room for twice as many."""
    query_lens = [8 * 700 + 1, 0, 8 * 400, 3]
    got = compute_causal_conv1d_metadata(int32(brute_force.starts(query_lens)))
    assert_programs(got, query_lens)
    assert got[1].shape == got[2].shape == (2 * (701 + 400 + 1),)


def test_conv1d_refuses():
    starts, room = int32([0, 9, 20]), lambda **k: torch.zeros(2048, **{"dtype": torch.int32, **k})
    same = room()
    for out, match in (
        ((room(dtype=torch.float16), room()), "batch_ptr must have dtype"),
        ((room(), torch.zeros(2, 9, dtype=torch.int32)), "token_chunk_offset_ptr must have shape"),
        ((same, same), "must not share memory"),
        ((int32([77] * 5), int32([77])), "token_chunk_offset_ptr must have at least 4 entries"),
    ):
        with pytest.raises(ValueError, match=match):
            compute_causal_conv1d_metadata(starts, out=out)
        assert out[0][-1] in (0, 77), "nothing is written"
    with pytest.raises(ValueError, match="query_start_loc_p must never fall"):
        compute_causal_conv1d_metadata(int32([0, 9, 3]))
    with pytest.raises(ValueError, match="query_start_loc_cpu must be given for a batch on meta"):
        compute_causal_conv1d_metadata(starts.to("meta"))
    with pytest.raises(ValueError, match="query_start_loc_cpu must have shape"):
        compute_causal_conv1d_metadata(starts, query_start_loc_cpu=int32([0, 9]))
