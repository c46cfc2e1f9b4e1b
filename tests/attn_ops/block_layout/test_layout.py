"""Layouts as lists, as tables, as masks and as pictures: all say the same."""

import operator
import runpy
from pathlib import Path

import pytest
import torch

from attn_ops.block_layout import (
    BlockLayout,
    BlocksparseParams,
    BlockTables,
    block_mask,
    dense_mask,
    dilated,
    flex_block_mask,
    layout_of,
    local_strided,
    sliding_global,
    svg,
    tables_of,
    text,
)

PARAMS = BlocksparseParams(300, 6, 2, 16, 2, 5)


def learned(num_heads: int = 6, num_blocks: int = 9) -> BlockLayout:
    """Any blocks at all, rows without one among them."""
    generator = torch.Generator().manual_seed(3)
    masks = torch.rand(num_heads, num_blocks, num_blocks, generator=generator) < 0.4
    masks[:, 4] = False
    return BlockLayout.from_masks(list(masks), 16, 2)


LAYOUTS = {
    "local_strided": local_strided(PARAMS),
    "sliding_global": sliding_global(6, 2, 9, 16, window_blocks=3, global_blocks=2),
    "dilated": dilated(6, 2, 9, 16, dilation=3, num_seen=2),
    "learned": learned(),
    "many heads": learned(80),
    "an empty head": BlockLayout.from_masks([torch.zeros(9, 9), torch.ones(9, 9)], 16, 2),
}
every = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def test_local_strided_is_the_definition():
    layout, blocks = LAYOUTS["local_strided"], PARAMS.num_blocks
    assert (layout.num_blocks, layout.max_seqlen) == (19, 304)
    for head in range(6):
        assert layout.mask(head).tolist() == block_mask(PARAMS, blocks, blocks, head)


def test_makers():
    sliding, steps = LAYOUTS["sliding_global"], LAYOUTS["dilated"]
    assert sliding.row(0, 8) == [0, 1, 6, 7, 8]
    assert sliding.row(5, 1) == [0, 1]
    assert steps.row(0, 8) == [5, 8]
    assert steps.row(0, 2) == [2]


@every
def test_rows_lists_and_masks_agree(layout):
    again = BlockLayout.from_rows(
        [[layout.row(n, r) for r in range(layout.num_blocks)] for n in range(layout.num_heads)],
        layout.block_size,
        layout.num_kv_heads,
    )
    for head in range(layout.num_heads):
        assert torch.equal(again.mask(head), layout.mask(head))
        assert not layout.mask(head).triu(1).any()


@every
def test_units_list_what_any_of_their_heads_sees(layout):
    """Blocks of a unit in order, with one bit a head."""
    tables = BlockTables(layout)
    group = layout.num_heads // layout.num_kv_heads
    per_kv_head = tables.unit_starts.shape[0] // layout.num_kv_heads
    assert per_kv_head == -(-group // 32)
    for unit, starts in enumerate(tables.unit_starts):
        first = unit // per_kv_head * group + unit % per_kv_head * 32
        heads = range(first, min(first + 32, (unit // per_kv_head + 1) * group))
        masks = torch.stack([layout.mask(head) for head in heads])
        for row in range(layout.num_blocks):
            entries = tables.unit_entries[starts[row] : starts[row + 1]]
            assert entries[:, 0].tolist() == masks[:, row].any(0).nonzero().flatten().tolist()
            bits = (entries[:, 1, None] >> torch.arange(len(heads))) & 1
            assert torch.equal(bits.bool().T, masks[:, row][:, entries[:, 0].long()])


@every
@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 0), (1, 1), (1, 100), (37, 141), (5, 5)])
def test_the_dense_mask(layout, num_queries, num_keys):
    mask = dense_mask(layout, num_queries, num_keys)
    assert mask.shape == (layout.num_heads, num_queries, num_keys)
    for head in (0, layout.num_heads - 1):
        blocks = layout.mask(head)
        for row in range(num_queries):
            position = num_keys - num_queries + row
            seen = [
                key <= position and bool(blocks[position // 16, key // 16])
                for key in range(num_keys)
            ]
            assert mask[head, row].tolist() == seen


@every
def test_the_block_mask_of_flex_attention(layout):
    """Blocks that the kernel visits, and what it is told within them."""
    from torch.nn.attention.flex_attention import create_mask

    mask = flex_block_mask(layout, 100)
    blocks = torch.stack([layout.mask(head)[:7, :7] for head in range(layout.num_heads)])
    assert torch.equal(mask.to_dense()[0].bool(), blocks)
    assert mask.kv_num_blocks.max() <= 1  # of a row, only its own block is masked
    tokens = create_mask(mask.mask_mod, 1, layout.num_heads, 100, 100, device="cpu")
    assert torch.equal(tokens[0], dense_mask(layout, 100, 100))


def test_equal_heads_share_their_blocks():
    """32 heads with 8 phases, in groups of 4: 8 lists of blocks, and 2 of units."""
    tables = BlockTables(local_strided(BlocksparseParams(2048, 32, 8, 64, 4, 8)))
    assert len(tables.starts[:, 0].unique()) == 8
    assert len(tables.unit_starts[:, 0].unique()) == 2


def test_density():
    layout = BlockLayout.from_rows([[[0], [1], [0, 2]]], 16, 1)
    assert layout.density() == 4 / 6
    assert layout.density(2) == 2 / 3


def test_tables_move_with_a_module_and_are_not_saved():
    layer = torch.nn.Module()
    layer.tables = BlockTables(LAYOUTS["dilated"])
    assert not layer.state_dict()
    assert {t.device.type for t in layer.to("meta").tables.tensors()} == {"meta"}
    assert all(t.dtype == torch.int32 for t in BlockTables(LAYOUTS["dilated"]).half().tensors())


def emptied(tables: BlockTables) -> None:
    """What Transformers does to buffers that are not saved, in `from_pretrained`."""
    for name, table in list(tables.named_buffers()):
        setattr(tables, name, torch.full_like(table, 2**30))


@pytest.mark.parametrize(
    "load",
    [
        emptied,
        lambda t: t.to_empty(device="cpu"),
        lambda t: t.to("meta").to_empty(device="cpu"),
        lambda t: t.share_memory().half(),
    ],
    ids=["from_pretrained", "to_empty", "meta", "half"],
)
def test_loaders_of_weights_leave_the_layout(load):
    """Nothing holds the tables besides the layout: memory in their place gets its values."""
    layer = torch.nn.Module()
    with torch.device("meta"):
        layer.tables = BlockTables(LAYOUTS["learned"])
    wanted = [t.clone() for t in BlockTables(LAYOUTS["learned"]).tensors()]
    load(layer.tables)
    assert all(map(torch.equal, layer.tables.tensors(), wanted))
    tables = layer.tables.tensors()
    assert all(map(operator.is_, layer.half().tables.tensors(), tables))  # graphs know addresses


def test_a_table_of_another_layout_is_refused():
    tables = BlockTables(LAYOUTS["learned"])
    with pytest.raises(ValueError, match=r"starts must have shape \[6, 10\] and torch.int32"):
        tables.starts = torch.zeros(2, 2, dtype=torch.int32)


def test_numbers_out_of_range_are_refused():
    short = sliding_global(2, 1, 2, 16, window_blocks=1, global_blocks=0)
    for call, message in (
        (lambda: dense_mask(short, 1, 33), "num_keys must be at most 32, .* got 33"),
        (lambda: dense_mask(short, 9, 8), "num_queries must be from 0 to 8, got 9"),
        (lambda: flex_block_mask(short, 33), "num_tokens must be at most 32, .* got 33"),
        (lambda: short.density(3), "num_blocks must be from 1 to 2, got 3"),
        (lambda: short.row(0, 2), "query_block must be from 0 to 1, got 2"),
        (lambda: text(short, [2]), "head must be from 0 to 1, got 2"),
        (
            lambda: dilated(2, 1, 2, 16, dilation=0, num_seen=1),
            "dilation must be at least 1",
        ),
        (lambda: sliding_global(2, 1, 2, 16, window_blocks=-1, global_blocks=0), "got -1"),
        (lambda: layout_of(lambda *_: True, 2, 1, 0, 16), "num_blocks must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_a_function_says_is_broadcast():
    layout = layout_of(lambda head, row, column: column <= head, 2, 1, 4, 16)
    assert [layout.row(0, 3), layout.row(1, 3)] == [[0], [0, 1]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[[0], [1, 0]]], "columns must ascend within a row.*got 0 in row 1"),
        ([[[0], [1, 1]]], "columns must ascend within a row.*got 1 in row 1"),
        ([[[1], [1]]], "from 0 up to the row itself, got 1 in row 0"),
        ([[[-1], [1]]], "got -1 in row 0"),
        ([[[0]], [[0], [1]]], "rows must be as many for each head"),
        ([], "rows must be as many for each head"),
    ],
)
def test_wrong_rows_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        BlockLayout.from_rows(rows, 16, 1)


def test_other_wrong_layouts_are_refused():
    starts, columns = torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for changes, message in (
        ({"block_size": 0}, "block_size must be an int of at least 1, got 0"),
        ({"num_kv_heads": 2}, "N a multiple of num_kv_heads 2"),
        ({"starts": starts.long()}, "starts must be int32 with 2 dimensions"),
        ({"starts": starts + 1}, "starts must ascend within 0..1"),
        ({"columns": columns[None]}, "columns must be int32 with 1 dimensions"),
    ):
        given = {"block_size": 16, "num_kv_heads": 1, "starts": starts, "columns": columns}
        with pytest.raises(ValueError, match=message):
            BlockLayout(**given | changes)
    for masks, message in (
        ([torch.tensor(1)], "masks must be of one shape"),
        ([torch.ones(2, 2), torch.ones(3, 3)], "masks must be of one shape"),
        ([], "masks must hold one a head"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockLayout.from_masks(masks, 16, 1)


def test_what_a_layer_may_be_given():
    assert tables_of(PARAMS, 6, 2).block_size == 16
    tables = BlockTables(LAYOUTS["dilated"])
    assert tables_of(tables, 6, 2) is tables
    with pytest.raises(ValueError, match="blocksparse must be for 8 heads and 2 KV heads, got 6"):
        tables_of(PARAMS, 8, 2)
    with pytest.raises(TypeError, match=r"blocksparse must be BlocksparseParams, .* got dict"):
        tables_of({}, 8, 2)  # pyright: ignore[reportArgumentType]


def test_pictures():
    layout = BlockLayout.from_rows([[[0], [1], [0, 2]], [[0], [0, 1], [0, 1, 2]]], 16, 1)
    assert text(layout, [0]) == "head 0\n#\n.#\n#.#\n"
    assert text(layout).count("head") == 2
    drawn = svg(layout)
    assert drawn.count("<polygon") == 2
    assert drawn.count("<rect") == 1 + 4 + 3  # the ground, and runs of blocks
    assert text(layout, [1], num_blocks=2) == "head 1\n#\n##\n"


def test_the_picture_of_the_page():
    """docs/backends.md shows the pattern that the code has."""
    path = Path(__file__).parents[3] / "docs" / "images" / "blocksparse.py"
    assert runpy.run_path(str(path))["drawn"]() == path.with_suffix(".svg").read_text()
