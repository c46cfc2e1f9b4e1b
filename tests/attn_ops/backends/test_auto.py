"""AUTO: which backend a batch goes to, and what it supports; on a GPU tests/conformance runs it."""

import dataclasses

import pytest
import torch

from attn_ops import AttentionCGSupport, AttentionSpec, CommonAttentionMetadata, get_backend
from attn_ops.backends import auto

SPEC = AttentionSpec(4, 2, 64, torch.bfloat16)
FP8 = dataclasses.replace(SPEC, kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("specs", "max_query_len", "name"),
    [
        ([SPEC], 1, "TRITON"),
        ([SPEC], 0, "TRITON"),
        ([SPEC], 2, "FLASH_ATTN"),
        ([FP8], 1, "TRITON"),
        ([FP8], 700, "TRITON"),
        ([SPEC, FP8], 700, "TRITON"),
    ],
)
def test_choice(specs, max_query_len, name):
    assert auto.choose(tuple(specs), max_query_len) == name


def test_support_is_that_of_both():
    support = auto.BACKEND.support
    parts = [get_backend(name).support for name in ("TRITON", "FLASH_ATTN")]
    assert support.head_sizes == (64, 96, 128, 192, 256)
    assert support.alibi is False
    assert support.quantizes_query is False, "TRITON takes FP8 caches"
    assert support.cudagraph is AttentionCGSupport.ALWAYS
    for field in dataclasses.fields(support):
        value = getattr(support, field.name)
        if isinstance(value, tuple):
            assert all(set(value) <= set(getattr(part, field.name)) for part in parts)


def test_a_level_is_the_weaker_one():
    weak = dataclasses.replace(
        auto.BACKEND.support, cudagraph=AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    level = auto.both(auto.BACKEND.support, weak).cudagraph
    assert level is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_metadata_names_the_backend_of_the_batch(monkeypatch):
    torch_backend = get_backend("TORCH")
    fakes = {n: dataclasses.replace(torch_backend, name=n) for n in ("TRITON", "FLASH_ATTN")}
    monkeypatch.setattr(auto, "_part", fakes.__getitem__)
    whole = dataclasses.replace(auto.BACKEND, support=torch_backend.support)
    builder = auto.AutoMetadataBuilder(whole, [SPEC], 16, "cpu", layer_names=["a"])
    for query, name in (([1, 1], "TRITON"), ([1, 3], "FLASH_ATTN")):
        common = CommonAttentionMetadata.from_lengths(query, [7, 7], [[1], [2]], 16)
        assert builder.build(0, common).backend.name == name
        assert builder.build_for_cudagraph_capture(common).backend.name == name
        assert builder.build_for_drafting(common, 0).backend.name == name


def test_it_needs_a_gpu():
    assert torch.cuda.is_available() or auto.BACKEND.unavailable()


def test_auto_takes_its_arguments_by_name():
    auto = get_backend("AUTO")
    spec = AttentionSpec(8, 2, 128, torch.bfloat16)
    builder = auto.builder(backend=auto, specs=[spec], block_size=16, device="cuda")
    assert builder.specs == (spec,)
