"""`validate` passes every batch that is right and names the one value that is wrong."""

import pytest
import torch

from attn_ops.metadata import CommonAttentionMetadata
from tests.attn_ops.metadata.ragged import NUM_BLOCKS, Ragged, batches, check, int32, int64

MIRRORS = ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu")


@check(batches())
def test_a_right_batch_passes(batch):
    """Also with bounds above the lengths, garbage behind what is in use and unknown mirrors."""
    tape = batch.tape
    common = batch.common(**batch.logits_fields(on_host=bool(tape.below(2))))
    common.max_query_len += tape.below(3)
    common.max_seq_len += tape.below(3)
    common.num_actual_tokens += tape.below(batch.num_rows - batch.num_tokens + 1)
    for request, length in enumerate(batch.seq_lens):
        common.block_table_tensor[request, -(-length // batch.block_size) :] = NUM_BLOCKS + 5
    common.block_table_tensor[:, 0] *= tape.below(2)  # the null block is a block
    if batch.num_reqs and tape.below(2):
        common.seq_lens_cpu_upper_bound = common.seq_lens_cpu + tape.below(2)
    for name in MIRRORS:
        if tape.below(4) == 3:
            setattr(common, name, None)
    sizes = tape.pick([(), (NUM_BLOCKS,), (NUM_BLOCKS, batch.block_size)])
    assert common.validate(*sizes) is None
    assert common.validate(*sizes, read_device=False) is None


def wrong_start(common: CommonAttentionMetadata, batch: Ragged) -> str:
    at = batch.tape.below(batch.num_reqs + 1)
    falls = at > 0
    value = batch.starts[at - 1] - 1 if falls else 1
    for starts in (common.query_start_loc, common.query_start_loc_cpu):
        starts[at] = value
    return rf"query_start_loc.*\[{at}\]={value}" if falls else "query_start_loc"


def short_seq_len(common: CommonAttentionMetadata, batch: Ragged) -> str | None:
    at = batch.tape.below(batch.num_reqs)
    value = batch.query_lens[at] - 1
    for lens in (common.seq_lens, common.seq_lens_cpu):
        lens[at] = value
    # A length of 0 is that of a padding request, but padding has no slots.
    return "slot_mapping.*be -1|num_computed_tokens_cpu" if value == 0 else rf"seq_lens.*\[{at}\]"


def low_count(common: CommonAttentionMetadata, batch: Ragged) -> str | None:
    name = batch.tape.pick(["max_query_len", "max_seq_len", "num_actual_tokens"])
    setattr(common, name, getattr(common, name) - 1)
    return name


def no_such_block(common: CommonAttentionMetadata, batch: Ragged) -> str | None:
    at = batch.tape.below(batch.num_reqs)
    blocks = -(-batch.seq_lens[at] // batch.block_size)
    if blocks == 0:
        return None
    column = batch.tape.below(blocks)
    value = batch.tape.pick([-1, NUM_BLOCKS])
    common.block_table_tensor[at, column] = value
    return rf"block_table.*\[{at}.*{column}\].*{value}"


def no_such_slot(common: CommonAttentionMetadata, batch: Ragged) -> str | None:
    if batch.num_rows == 0:
        return None
    at = batch.tape.below(batch.num_rows)
    value = batch.tape.pick([-2, NUM_BLOCKS * batch.block_size])
    common.slot_mapping[at] = value
    return rf"slot_mapping.*\[{at}\]={value}"


def wrong_mirror(common: CommonAttentionMetadata, batch: Ragged) -> str | None:
    name = batch.tape.pick(MIRRORS)
    mirror = getattr(common, name)
    at = batch.tape.below(mirror.shape[0])
    mirror[at] += 1
    return rf"{name}.*\[{at}\]"


def low_bound(common: CommonAttentionMetadata, batch: Ragged) -> str | None:
    at = batch.tape.below(batch.num_reqs)
    common.seq_lens_cpu_upper_bound = common.seq_lens_cpu.clone()
    common.seq_lens_cpu_upper_bound[at] -= 1
    return rf"seq_lens_cpu_upper_bound.*\[{at}\]"


SPOILERS = [
    wrong_start, short_seq_len, low_count, no_such_block, no_such_slot, wrong_mirror, low_bound,
]  # fmt: skip


@check(batches())
def test_one_wrong_value_is_named(batch):
    common = batch.common()
    spoil = batch.tape.pick(SPOILERS)
    if batch.num_reqs == 0 and spoil is not no_such_slot:
        spoil = low_count
    name = spoil(common, batch)
    if name is None:
        common.validate(NUM_BLOCKS, batch.block_size)
        return
    with pytest.raises(ValueError, match=name):
        common.validate(NUM_BLOCKS, batch.block_size)


@pytest.fixture
def common() -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        [1, 2], [5, 2], int32([[1, 2], [3, 0]]), 4, num_padded_tokens=5
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_query_len": 1}, "max_query_len"),
        ({"max_seq_len": 4}, "max_seq_len"),
        ({"num_actual_tokens": 2}, "num_actual_tokens"),
        ({"query_start_loc_cpu": int32([0, 4, 3])}, "query_start_loc"),
        ({"seq_lens_cpu": int32([5, 1])}, "seq_lens"),
    ],
)
def test_the_host_sees_its_own_errors_without_the_device(common, changes, name):
    with pytest.raises(ValueError, match=name):
        common.replace(**changes).validate(read_device=False)


@pytest.mark.parametrize("unknown", [(), MIRRORS[:1], MIRRORS[1:2], MIRRORS[2:], MIRRORS])
def test_what_the_host_does_not_know_is_not_checked(unknown):
    """Tensors on the meta device have no values to read: reading them would raise."""
    on_meta = CommonAttentionMetadata.from_lengths(
        [1, 2], [5, 2], torch.ones(2, 2, dtype=torch.int32), 4, device="meta"
    ).replace(**dict.fromkeys(unknown))
    on_meta.validate(num_blocks=9, read_device=False)
    with pytest.raises(ValueError, match="num_logits_indices"):
        on_meta.replace(logits_indices_padded=int64([0]).to("meta"), num_logits_indices=2).validate(
            read_device=False
        )


def test_padding_rows_may_count_as_tokens(common):
    """A captured batch counts them; more than there are rows is refused."""
    common.num_actual_tokens = 5
    common.validate()
    common.num_actual_tokens = 6
    with pytest.raises(ValueError, match="num_actual_tokens"):
        common.validate()


def test_a_tensor_assigned_later_is_checked(common):
    common.seq_lens = int64([5, 2])
    with pytest.raises(ValueError, match="seq_lens must have dtype"):
        common.validate()


@pytest.mark.parametrize("rows", [[0, 3], [-1, 0]])
def test_logits_indices_are_rows(common, rows):
    wrong = common.replace(
        logits_indices_padded=int64(rows), logits_indices_cpu=int64(rows), num_logits_indices=2
    )
    with pytest.raises(ValueError, match="logits_indices"):
        wrong.validate()


from_lengths = CommonAttentionMetadata.from_lengths


def test_validate_looks_at_sizes():
    common = from_lengths([1, 2], [5, 2], [[1, 2], [3, 4]], 4)
    logits = {"logits_indices_padded": int64([0, 2]), "num_logits_indices": 2}
    for changes, name in (
        ({"positions": int64([9] * 7)}, "positions"),
        ({"encoder_seq_lens": [1, 2, 3]}, "encoder_seq_lens"),
        ({"logits_indices_padded": int64([0]), "num_logits_indices": 3}, "num_logits_indices"),
        ({**logits, "logits_indices_cpu": int64([0, 1])}, "logits_indices_cpu"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must"):
            common.replace(**changes).validate()
    for arguments, name in (({"block_size": 8}, "block_size"), ({"num_blocks": 0}, "num_blocks")):
        with pytest.raises(ValueError, match=f"^{name} must"):
            common.validate(**arguments)
