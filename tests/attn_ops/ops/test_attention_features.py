"""Every declared feature is an argument of `attention` and reaches the backend."""

import dataclasses

import pytest
import torch

from attn_ops import (
    Attention,
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
    attention_with_lse,
    gather_kv,
    get_backend,
    write_kv,
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


def stored_and_read(kv_cache_dtype, by_module):
    """Keys written by hand or by a layer, the output, and the keys read back."""
    torch.manual_seed(0)
    fp8 = {"kv_cache_dtype": kv_cache_dtype}
    spec = AttentionSpec(4, 2, 8, torch.float32, **fp8)
    common = CommonAttentionMetadata.from_lengths(
        [3], [3], torch.tensor([[1]], dtype=torch.int32), 4
    )
    meta = get_backend("TORCH").builder(get_backend("TORCH"), [spec], 4, "cpu").build(0, common)
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    cache = torch.zeros(spec.cache_shape(2, 4), dtype=spec.cache_dtype)
    if by_module:
        out = Attention(4, 2, 8)(q, k, v, cache, meta, **fp8)
    else:
        write_kv(k, v, cache, meta, **fp8)
        out = attention(q, cache, meta, 8**-0.5, **fp8)
    table, lengths = common.block_table_tensor, common.seq_lens
    return out, cache, gather_kv(cache, table, lengths, 3, dtype=torch.float32, **fp8)[0]


@pytest.mark.parametrize("by_module", [False, True])
def test_fp8_is_e4m3(by_module):
    wanted, got = (stored_and_read(name, by_module) for name in ("fp8_e4m3", "fp8"))
    for one, other in zip(wanted, got, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("call", [attention, attention_with_lse], ids=["attention", "with_lse"])
@pytest.mark.parametrize("feature", FEATURES, ids=[feature.name for feature in FEATURES])
def test_a_feature_reaches_the_backend(feature, call):
    argument, value = feature.name, VALUES[feature.schema]
    if feature.declared == "blocksparse":  # a layout says the size of its blocks
        argument, value = "blocksparse", BLOCKS
    assert getattr(called_with(call, **{argument: value}), feature.name) is not None
    assert getattr(called_with(call), feature.name) is None
