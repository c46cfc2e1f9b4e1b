"""Which backend AUTO_MLA takes for a batch, and what it supports."""

import pytest
import torch

from attn_ops import get_backend
from attn_ops.backends.composite import Sizes
from attn_ops.backends.mla import auto_mla
from attn_ops.metadata import AttentionSpec, LatentShape

DEEPSEEK = LatentShape(512, 128, 64, 128)


@pytest.mark.parametrize(
    ("heads", "num_reqs", "max_query_len", "max_seq_len", "kv_cache_dtype", "name"),
    [
        (16, 1, 1, 512, "auto", "TRITON_MLA"), (16, 256, 1, 65536, "auto", "TRITON_MLA"),
        (16, 1, 2, 512, "auto", "FLASH_ATTN_MLA"), (8, 64, 2, 512, "auto", "TRITON_MLA"),
        (128, 2, 1, 4096, "auto", "TRITON_MLA"), (128, 2, 1, 4097, "auto", "FLASH_ATTN_MLA"),
        (128, 3, 1, 10, "auto", "FLASH_ATTN_MLA"), (128, 1, 2, 10, "auto", "FLASH_ATTN_MLA"),
        (128, 256, 9, 8193, "fp8_e4m3", "TRITON_MLA"),
    ],
)  # fmt: skip
def test_choice(heads, num_reqs, max_query_len, max_seq_len, kv_cache_dtype, name):
    spec = AttentionSpec.of_latent(heads, DEEPSEEK, torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    assert auto_mla.rule(spec, Sizes(num_reqs, max_query_len, max_seq_len)).name == name


def test_supports_what_its_parts_do():
    support = auto_mla.BACKEND.support
    parts = [get_backend(name).support for name in ("FLASH_ATTN_MLA", "TRITON_MLA")]
    assert support.dtypes == parts[0].dtypes
    assert support.kv_cache_dtypes == parts[1].kv_cache_dtypes
    assert set(support.block_sizes) == set(parts[0].block_sizes) & set(parts[1].block_sizes)
    assert not support.output_quant
