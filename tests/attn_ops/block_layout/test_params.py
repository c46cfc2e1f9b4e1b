"""Parameters of local plus strided sparsity: derived values, the pattern, what is refused."""

import dataclasses

import pytest

from attn_ops.block_layout import BlocksparseParams, block_mask


def make(**changes) -> BlocksparseParams:
    given = {"max_seqlen": 1024, "num_heads": 8, "num_kv_heads": 2, "block_size": 64}
    return BlocksparseParams(**given | {"local_blocks": 2, "vert_stride": 4} | changes)


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, 1),
        ({"vert_stride": 32}, 4),
        ({"vert_stride": 32, "tp_size": 2}, 2),
        ({"vert_stride": 33, "tp_size": 4}, 1),
        ({"homo_head": True}, 0),
        ({"homo_head": True, "homo_head_group": True}, 0),
        ({"homo_head_group": True}, -2),
        ({"homo_head_group": True, "vert_stride": 1}, -1),
        ({"homo_head_group": True, "vert_stride": 32, "tp_size": 4}, -4),
    ],
)
def test_the_sliding_step(changes, step):
    """As vLLM derives it: from the heads of all ranks, negative along KV heads."""
    assert make(**changes).head_sliding_step == step


def test_the_heads_of_a_rank():
    assert make().active_head_range == (0, 8)
    assert make(tp_size=4, tp_rank=3).active_head_range == (24, 32)


@pytest.mark.parametrize("pattern", [{}, {"homo_head": True}, {"homo_head_group": True}])
@pytest.mark.parametrize("vert_stride", [1, 3, 4, 9, 40])
def test_the_pattern_is_that_of_the_reference(pattern, vert_stride):
    """The two rules that vLLM's kernel asks of a block, written out again."""
    params = make(vert_stride=vert_stride, num_heads=4, tp_size=2, tp_rank=1, **pattern)
    step = params.head_sliding_step
    for head in range(4):
        offset = (4 + head) * step if step >= 0 else (2 + head // 2) * -step
        for row, seen in enumerate(block_mask(params, 12, 12, head)):
            for block, visible in enumerate(seen):
                remote = (block + offset + 1) % vert_stride == 0
                local = block > row - params.local_blocks
                assert visible == (block <= row and (remote or local)), (head, row, block)


@pytest.mark.parametrize("step_of", [{}, {"homo_head": True}, {"homo_head_group": True}])
def test_ranks_have_slices_of_the_whole(step_of):
    """Heads are counted over all ranks, so that ranks together see what one rank would see."""
    whole = make(num_heads=16, num_kv_heads=4, vert_stride=9, **step_of)
    for rank in range(4):
        part = make(vert_stride=9, num_heads=4, num_kv_heads=1, tp_size=4, tp_rank=rank, **step_of)
        for head in range(4):
            assert block_mask(part, 9, 9, head) == block_mask(whole, 9, 9, 4 * rank + head)


def test_query_blocks_are_the_last_ones():
    params = make()
    assert block_mask(params, 3, 10, 1) == block_mask(params, 10, 10, 1)[7:]
    assert block_mask(params, 0, 0, 0) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqlen": 0}, "max_seqlen must be an int of at least 1, got 0"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 8 and 3"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 1.5}, "block_size must be an int"),
        ({"local_blocks": -1}, "local_blocks must be an int of at least 0, got -1"),
        ({"vert_stride": 0}, "vert_stride"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_rank": -1}, "tp_rank"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank must be below tp_size 2, got 2"),
        ({"vert_stride": True}, "vert_stride must be an int"),
    ],
)
def test_wrong_numbers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_wrong_blocks_and_heads_are_refused():
    with pytest.raises(ValueError, match="num_q_blocks must be from 0 to 4, got 5"):
        block_mask(make(), 5, 4, 0)
    with pytest.raises(ValueError, match="head must be from 0 to 7, got 8"):
        block_mask(make(), 1, 4, 8)


def test_derived_values_are_not_arguments():
    with pytest.raises(TypeError):
        BlocksparseParams(1, 1, 1, 1, 1, 1, head_sliding_step=3)  # pyright: ignore[reportCallIssue]
    assert dataclasses.replace(make(), vert_stride=16).head_sliding_step == 2
