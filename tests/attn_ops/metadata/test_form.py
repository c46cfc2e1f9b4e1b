"""The form of a batch's tensors: dtype, rank, length, device; counts are ints."""

import dataclasses

import pytest
import torch

from attn_ops import CommonAttentionMetadata


def table(rows: int, width: int = 2) -> torch.Tensor:
    return torch.arange(1, rows * width + 1, dtype=torch.int32).view(rows, width)


@pytest.fixture(scope="module")
def common() -> CommonAttentionMetadata:
    made = CommonAttentionMetadata.from_lengths([1, 2], [5, 2], table(2), 4)
    return dataclasses.replace(made, logits_indices=torch.tensor([0, 2]))


TENSORS = {
    "query_start_loc": (torch.int32, 3),
    "query_start_loc_cpu": (torch.int32, 3),
    "seq_lens": (torch.int32, 2),
    "seq_lens_cpu": (torch.int32, 2),
    "num_computed_tokens_cpu": (torch.int32, 2),
    "block_table_tensor": (torch.int32, None),
    "slot_mapping": (torch.int64, None),
    "logits_indices": (torch.int64, None),
}


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_dtype(common, name):
    other = torch.int64 if TENSORS[name][0] == torch.int32 else torch.int32
    with pytest.raises(
        ValueError, match=f"^{name} must have dtype {TENSORS[name][0]}, got {other}"
    ):
        dataclasses.replace(common, **{name: getattr(common, name).to(other)})


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_rank_and_length(common, name):
    right = getattr(common, name)
    with pytest.raises(ValueError, match=f"^{name} must have shape"):
        dataclasses.replace(common, **{name: right.unsqueeze(-1)})
    if TENSORS[name][1] is not None:
        with pytest.raises(ValueError, match=rf"^{name} must have shape \[{TENSORS[name][1]}\]"):
            dataclasses.replace(common, **{name: torch.cat([right, right[:1]])})


@pytest.mark.parametrize("name", [n for n in TENSORS if n != "seq_lens"])
def test_wrong_device(common, name):
    with pytest.raises(ValueError, match=f"^{name} must be on cpu, got meta"):
        dataclasses.replace(common, **{name: getattr(common, name).to("meta")})


def test_the_device_is_that_of_seq_lens(common):
    with pytest.raises(ValueError, match=r"^query_start_loc must be on meta, got cpu"):
        dataclasses.replace(common, seq_lens=common.seq_lens.to("meta"))


def test_block_table_has_a_row_a_request(common):
    with pytest.raises(
        ValueError, match=r"^block_table_tensor must have shape \[2, any\], got \[3, 2\]"
    ):
        dataclasses.replace(common, block_table_tensor=table(3))


from_lengths = CommonAttentionMetadata.from_lengths


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"])
def test_counts_are_ints(name):
    common = from_lengths([1, 2], [5, 2], [[1, 2], [3, 4]], 4)
    for value in (torch.tensor(2), 2.0, True):
        with pytest.raises(ValueError, match=f"^{name} must be an int"):
            common.replace(**{name: value})
