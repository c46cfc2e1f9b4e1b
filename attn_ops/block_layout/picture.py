"""A layout as a picture: a square a head, rows of query blocks over columns of blocks."""

from collections.abc import Sequence

import torch

from attn_ops.block_layout.layout import BlockLayout

CELL, GAP, MARGIN = 6, 14, 18
"""Pixels: a block, between two heads, around."""


def distinct(layout: BlockLayout) -> list[int]:
    """The first of all heads that see the same blocks."""
    masks: list[torch.Tensor] = []
    heads = []
    for head in range(layout.num_heads):
        mask = layout.mask(head)
        if not any(torch.equal(mask, known) for known in masks):
            masks.append(mask)
            heads.append(head)
    return heads


def text(layout: BlockLayout, heads: Sequence[int] | None = None, num_blocks: int = 32) -> str:
    """The first `num_blocks` of some heads: `#` is seen, `.` is not."""
    size, parts = min(num_blocks, layout.num_blocks), []
    for head in range(layout.num_heads) if heads is None else heads:
        seen_RR = layout.mask(head)[:size, :size].tolist()
        rows = ["".join(".#"[c] for c in row[: i + 1]) for i, row in enumerate(seen_RR)]
        parts.append("\n".join([f"head {head}", *rows]))
    return "\n\n".join(parts) + "\n"


def svg(layout: BlockLayout, heads: Sequence[int] | None = None, num_blocks: int = 32) -> str:
    """The same, drawn, four heads a line."""
    size = min(num_blocks, layout.num_blocks)
    chosen = list(range(layout.num_heads) if heads is None else heads)
    side = size * CELL
    columns = min(len(chosen), 4)
    lines = -(-len(chosen) // 4)
    width = 2 * MARGIN + columns * side + (columns - 1) * GAP
    height = MARGIN + lines * (side + GAP + MARGIN)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for place, head in enumerate(chosen):
        x = MARGIN + place % 4 * (side + GAP)
        y = MARGIN + place // 4 * (side + GAP + MARGIN)
        drawn += _square(layout, head, size, x, y)
    return "\n".join([*drawn, "</svg>\n"])


def _square(layout: BlockLayout, head: int, size: int, x: int, y: int) -> list[str]:
    side = size * CELL
    corners = f"{x},{y} {x},{y + side} {x + side},{y + side}"
    found = [
        f'<text x="{x}" y="{y - 5}">head {head}</text>',
        f'<polygon points="{corners}" fill="#eeeeee"/>',
    ]
    for row in range(size):
        for begin, end in _runs(layout.row(head, row)):
            color = "#1b6ca8" if end == row + 1 else "#e08a1e"
            found.append(
                f'<rect x="{x + begin * CELL}" y="{y + row * CELL}" '
                f'width="{(end - begin) * CELL}" height="{CELL}" fill="{color}"/>'
            )
    return found


def _runs(columns: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive columns as (first, behind the last)."""
    runs: list[tuple[int, int]] = []
    for column in columns:
        if runs and runs[-1][1] == column:
            runs[-1] = (runs[-1][0], column + 1)
        else:
            runs.append((column, column + 1))
    return runs
