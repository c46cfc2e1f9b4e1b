"""Patches of Inductor before torch 2.13: here any version is taken for an old one."""

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import pad_mm
from torch._inductor.ir import ConcatKernel
from torch._inductor.runtime.triton_heuristics import Grid2DWithYZOverflow, GridExpr
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from attn_ops.compat import inductor_until_2_13
from attn_ops.compat.inductor_until_2_13 import inductor_mended

NAMES = [
    (ConcatKernel, "create"),
    (pad_mm, "is_mm_compute_bound"),
    (Grid2DWithYZOverflow, "generate"),
]


def patched():
    cat = select_decomp_table()[torch.ops.aten.cat.default]
    return [vars(owner)[name] for owner, name in NAMES] + [cat]


@pytest.fixture
def old(monkeypatch):
    monkeypatch.setattr(inductor_until_2_13, "TORCH_VERSION", (2, 12))


def test_what_was_there_comes_back(old):
    """Nested, and after an error."""
    before = patched()
    with inductor_mended():
        once = patched()
        assert all(a is not b for a, b in zip(once, before, strict=True))
        with pytest.raises(KeyError), inductor_mended():
            raise KeyError
        assert patched() == once
    assert patched() == before


def test_newer_versions_are_left_alone(monkeypatch):
    monkeypatch.setattr(inductor_until_2_13, "TORCH_VERSION", (2, 13))
    before = patched()
    with inductor_mended():
        assert patched() == before


def test_sizes_are_asked_by_their_hints():
    env, asked = ShapeEnv(), []
    symbol = env.create_symbol(17, source=ConstantSource("T"), dynamic_dim=DimDynamic.DYNAMIC)
    rows = env.create_symintnode(symbol, hint=17)

    def is_large(*sizes):
        asked.append(sizes)
        return sizes[0] > 4

    assert inductor_until_2_13._by_hints(is_large)(rows, 8, 8, torch.float32)
    assert asked == [(17, 8, 8, torch.float32)]
    assert not env.guards
    assert is_large(rows), "asked of the symbol, it leaves a guard"
    assert env.guards


@pytest.mark.parametrize(
    ("rows", "grid"), [(0, (7, 0, 0)), (1, (7, 1, 1)), (70000 * 32, (7, 35000, 2))]
)
def test_grids_of_no_rows_are_empty(old, rows, grid):
    with inductor_mended():
        made = GridExpr.from_meta(
            {"grid_type": "Grid2DWithYZOverflow"}, {"XBLOCK": 16, "YBLOCK": 32}
        )
    assert made.eval_slow({"xnumel": 100, "ynumel": rows}) == grid
