"""Draws blocksparse.svg of docs/backends.md: `python docs/images/blocksparse.py`."""

from pathlib import Path

from attn_ops.block_layout import BlocksparseParams, distinct, local_strided, svg


def drawn() -> str:
    """Phi-3-small's pattern: of 32 heads, the 8 that see different blocks."""
    layout = local_strided(BlocksparseParams(48 * 64, 32, 8, 64, 16, 8))
    return svg(layout, distinct(layout), num_blocks=48)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawn())
