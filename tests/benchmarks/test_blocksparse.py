"""The benchmark of block-sparse attention: its figures, and that it runs."""

import json
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from attn_ops import AttentionSpec
from attn_ops.block_layout import BlocksparseParams, local_strided
from benchmarks import blocksparse
from graphs.app.bench import shape_of


def test_active_bytes_are_those_that_any_head_of_a_kv_head_sees():
    """Two KV heads of two: block 5 sees itself and, by phases, blocks 2 and 1, or 0 and 2."""
    layout = local_strided(BlocksparseParams(96, 4, 2, 16, 1, 3))
    assert [layout.row(head, 5) for head in range(4)] == [[2, 5], [1, 4, 5], [0, 3, 5], [2, 5]]
    spec = AttentionSpec(4, 2, 8, torch.float16)
    shape = shape_of("3x90")  # 10 tokens of block 5
    keys = (3 * 16 + 10) + (3 * 16 + 10)
    assert blocksparse.active_bytes(layout, shape, spec) == 3 * keys * 8 * 2 * 2


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path):
    path = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--rounds", "1", "--block-size", "16", "--json", str(path)]
    blocksparse.main(arguments)
    result = json.loads(path.read_text())
    assert set(result["rows"]["80"]) == {"listed", "ours"}
    assert set(result["rows"]["2x100"]) == {"listed", "ours", "ideal", "ideal / ours"}
