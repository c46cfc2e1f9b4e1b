"""Every declared feature is an argument of `attention` and reaches the backend."""

import dataclasses

import pytest
import torch

from attn_ops import (
    Attention,
    attention,
    attention_with_lse,
    gather_kv,
    get_backend,
    write_kv,
)
from attn_ops.block_layout import BlocksparseParams, BlockTables, local_strided
from attn_ops.metadata.features import FEATURES
from tests.kit.batches import build_batch

VALUES = {"int?": 5, "float?": 3.0, "Tensor?": torch.full((4,), 0.5)}  # by schema
BLOCKS = BlockTables(local_strided(BlocksparseParams(16, 4, 2, 4, 1, 2)))


def called_with(call, **asked):
    """The options that a backend's forward gets."""
    got = []
    torch_backend = get_backend("TORCH")

    def forward(q, kv_cache, meta, options, *plan):
        got.append(options)
        return torch_backend.forward(q, kv_cache, meta, options, *plan)

    backend = dataclasses.replace(torch_backend, forward=forward)
    b = build_batch([2, 1], [2, 3], backend=backend)
    call(b.q, b.kv_cache, b.meta, 0.5, **asked)
    (options,) = got
    return options


@pytest.mark.parametrize("by_module", [False, True])
def test_fp8_is_e4m3(by_module):
    b, read = build_batch([3], [3], written=False), []
    for name in ("fp8_e4m3", "fp8"):
        fp8, cache = {"kv_cache_dtype": name}, torch.zeros(b.kv_cache.shape, dtype=torch.uint8)
        if by_module:
            out = Attention(4, 2, 8)(b.q, b.k, b.v, cache, b.meta, **fp8)
        else:
            write_kv(b.k, b.v, cache, b.meta, **fp8)
            out = attention(b.q, cache, b.meta, 8**-0.5, **fp8)
        table, lengths = b.common.block_table_tensor, b.common.seq_lens
        read.append((out, cache, *gather_kv(cache, table, lengths, 3, dtype=torch.float32, **fp8)))
    assert all(map(torch.equal, *read))


@pytest.mark.parametrize("call", [attention, attention_with_lse], ids=["attention", "with_lse"])
@pytest.mark.parametrize("feature", FEATURES, ids=[feature.name for feature in FEATURES])
def test_a_feature_reaches_the_backend(feature, call):
    argument, value = feature.name, VALUES[feature.schema]
    if feature.declared == "blocksparse":  # a layout says the size of its blocks
        argument, value = "blocksparse", BLOCKS
    assert getattr(called_with(call, **{argument: value}), feature.name) is not None
    assert getattr(called_with(call), feature.name) is None
