"""AUTO: which backend a batch goes to, and what it supports; on a GPU tests/conformance runs it."""

import dataclasses

import pytest
import torch

from attn_ops import AttentionCGSupport, AttentionSpec, CommonAttentionMetadata, get_backend
from attn_ops.backends import auto
from attn_ops.backends.composite import Sizes

SPEC = AttentionSpec(4, 2, 64, torch.bfloat16)
FP8 = dataclasses.replace(SPEC, kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("spec", "max_query_len", "name"),
    [
        (SPEC, 1, "TRITON"),
        (SPEC, 0, "TRITON"),
        (SPEC, 2, "FLASH_ATTN"),
        (FP8, 1, "TRITON"),
        (FP8, 700, "TRITON"),
    ],
)
def test_choice(spec, max_query_len, name):
    assert auto.rule(spec, Sizes(9, max_query_len, 1000)).name == name
    used = {"TRITON"} if spec is FP8 else {"TRITON", "FLASH_ATTN"}
    assert auto.BACKEND.used([spec]).keys() == used


def test_support_is_that_of_both():
    support = auto.BACKEND.support
    parts = [get_backend(name).support for name in ("TRITON", "FLASH_ATTN")]
    assert support.head_sizes == (64, 96, 128, 192, 256)
    assert support.alibi is False
    assert support.quantizes_query is False, "TRITON takes FP8 caches"
    assert support.cudagraph is AttentionCGSupport.ALWAYS
    for field in dataclasses.fields(support):
        value = getattr(support, field.name)
        for other in (getattr(part, field.name) for part in parts):
            if isinstance(value, tuple):
                assert set(value) <= set(other)
            elif isinstance(value, bool):
                assert value <= other, field.name


@pytest.fixture
def on_cpu(monkeypatch):
    """AUTO of two parts that are TORCH."""
    torch_backend = get_backend("TORCH")
    parts = [dataclasses.replace(torch_backend, name=n) for n in ("TRITON", "FLASH_ATTN")]
    for part in parts:
        monkeypatch.setattr(auto, part.name, part)
    return dataclasses.replace(auto.BACKEND, support=torch_backend.support, parts=tuple(parts))


def test_metadata_names_the_backend_of_the_batch(on_cpu):
    builder = on_cpu.builder(on_cpu, [SPEC], 16, "cpu", layer_names=["a"])
    for query, name in (([1, 1], "TRITON"), ([1, 3], "FLASH_ATTN")):
        common = CommonAttentionMetadata.from_lengths(query, [7, 7], [[1], [2]], 16)
        assert builder.build(0, common).backend.name == name
        assert builder.build_for_cudagraph_capture(common).backend.name == name
        assert builder.build_for_drafting(common, 0).backend.name == name


def test_layers_of_one_batch_on_two_backends(on_cpu):
    """Only where some caches are FP8: each layer has its own backend's metadata."""
    builder = on_cpu.builder(on_cpu, [SPEC, FP8], 16, "cpu")
    common = CommonAttentionMetadata.from_lengths([1, 3], [7, 7], [[1], [2]], 16)
    meta = builder.build(0, common)
    assert meta.backend is on_cpu
    assert {s: m.backend.name for s, m in meta.plans.items()} == {SPEC: "FLASH_ATTN", FP8: "TRITON"}


def test_prefixes_of_decodes_go_where_prompts_go(on_cpu):
    builder = on_cpu.builder(on_cpu, [SPEC], 16, "cpu")
    assert builder.cascades_on_device
    table = [[1, 2], [1, 3]]
    common = CommonAttentionMetadata.from_lengths([1, 1], [20, 30], table, 16)
    shared = torch.tensor([16, 16], dtype=torch.int32)
    starts = torch.tensor([0, 2, 2], dtype=torch.int32)
    for meta in (builder.build(16, common), builder.build_cascade(common, shared, starts)):
        prefix, rest = meta.views.cascade
        assert [m.backend.name for m in (meta, prefix, rest)] == ["TRITON", "FLASH_ATTN", "TRITON"]


def test_it_needs_a_gpu():
    assert torch.cuda.is_available() or auto.BACKEND.unavailable()


def test_auto_takes_its_arguments_by_name():
    auto = get_backend("AUTO")
    spec = AttentionSpec(8, 2, 128, torch.bfloat16)
    builder = auto.builder(backend=auto, specs=[spec], block_size=16, device="cuda")
    assert builder.specs == (spec,)
