"""Every declared feature is an argument of `attention` and reaches the backend."""

import dataclasses
import inspect

import pytest
import torch

from attn_ops import (
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
    attention_with_lse,
    get_backend,
)
from attn_ops.block_layout import BlocksparseParams, BlockTables, local_strided
from attn_ops.metadata.features import FEATURES

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
    spec = AttentionSpec(4, 2, 8, torch.float32)
    common = CommonAttentionMetadata.from_lengths(
        [2, 1], [2, 3], torch.tensor([[1], [2]], dtype=torch.int32), 4
    )
    meta = backend.builder(backend, [spec], 4, "cpu").build(0, common)
    call(torch.randn(3, 4, 8), torch.randn(3, 2, 4, 2, 8), meta, 0.5, **asked)
    (options,) = got
    return options


@pytest.mark.parametrize("call", [attention, attention_with_lse], ids=["attention", "with_lse"])
@pytest.mark.parametrize("feature", FEATURES, ids=[feature.name for feature in FEATURES])
def test_a_feature_reaches_the_backend(feature, call):
    argument, value = feature.name, VALUES[feature.schema]
    if feature.declared == "blocksparse":  # a layout says the size of its blocks
        argument, value = "blocksparse", BLOCKS
    assert inspect.signature(call).parameters[argument].default is None
    assert getattr(called_with(call, **{argument: value}), feature.name) is not None
    assert getattr(called_with(call), feature.name) is None
