"""Caches of latents: gathered from any position, copied and swapped."""

from unittest.mock import Mock

import pytest
import torch

from attn_ops import copy_blocks, copy_blocks_mla, gather_mla_kv, swap_blocks
from attn_ops.backends.mla.gather import by_triton
from attn_ops.backends.triton import converts_e4m3
from attn_ops.metadata import KV_CACHE_DTYPES
from tests.kit.latent import build_latent_batch
from tests.kit.operators import opcheck

SEQ_LENS = [7, 0, 1, 19]
PARTS = {
    "all": ([0, 0, 0, 0], [7, 0, 1, 19]),
    "from the middle of a page": ([2, 0, 0, 7], [5, 0, 1, 9]),
    "from pages": ([4, 0, 0, 8], [3, 0, 1, 4]),
    "some have none": ([0, 0, 0, 18], [0, 0, 0, 1]),
}


def gathered(b, starts, counts, num_rows: int, **keywords) -> torch.Tensor:
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    out = torch.full((num_rows, 20), 3.0)
    table = b.common.block_table_tensor
    gather_mla_kv(b.kv_cache, table, ends, torch.tensor(starts).int(), out, **keywords)
    return out


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8", "fp8_e5m2"])
def test_gather(part, kv_cache_dtype):
    starts, counts = PARTS[part]
    b = build_latent_batch([1, 0, 1, 1], SEQ_LENS, kv_cache_dtype=kv_cache_dtype)
    scale = b.keywords.get("kv_scale")
    out = gathered(b, starts, counts, 40, kv_cache_dtype=kv_cache_dtype, scale=scale)
    want = []
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for position in range(start, start + count):
            block = b.common.block_table_tensor[i, position // 4]
            row = b.kv_cache[block, position % 4]
            if scale is not None:
                e5m2 = kv_cache_dtype == "fp8_e5m2"
                row = row.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn).float() * scale
            want.append(row)
    assert torch.equal(out[: len(want)], torch.stack(want))
    assert (out[len(want) :] == 3).all(), "rows behind the last request's stay"


def test_opcheck_gather():
    b = build_latent_batch([1, 0, 1, 1], SEQ_LENS)
    ends, starts = torch.tensor([0, 5, 5, 6, 15]).int(), torch.tensor([2, 0, 0, 7]).int()
    arguments = (b.kv_cache, b.common.block_table_tensor, ends, starts, torch.zeros(20, 20))
    opcheck(torch.ops.attn_ops.gather_mla_kv.default, arguments)


REFUSED = {
    "kv_cache": (torch.zeros(3, 2, 4, 1, 20), "kv_cache must have shape"),
    "block_table": (torch.zeros(1, 3).int(), r"block_table must have shape \[2, any\]"),
    "cu_seq_lens": (torch.zeros(2).int(), r"cu_seq_lens must have shape \[3\]"),
    "seq_starts": (torch.zeros(2).long(), "seq_starts must have dtype torch.int32"),
    "out": (torch.zeros(9, 19), r"out must have shape \[any, 20\]"),
    "kv_cache_dtype": ("int4", "kv_cache_dtype must be known"),
    "scale": (torch.ones(2), "scale must be torch.float32"),
}


@pytest.mark.parametrize("name", [*REFUSED, "dtype"])
def test_gathers_that_do_not_fit_are_refused(name):
    asked = {
        "kv_cache": torch.zeros(3, 4, 20),
        "block_table": torch.ones(2, 2).int(),
        "cu_seq_lens": torch.tensor([0, 1, 3]).int(),
        "seq_starts": torch.zeros(2).int(),
        "out": torch.zeros(9, 20),
    }
    gather_mla_kv(**asked)
    change, message = REFUSED.get(name, (torch.zeros(9, 20).half(), "out must have the cache's"))
    with pytest.raises(ValueError, match=message):
        gather_mla_kv(**(asked | {"out" if name == "dtype" else name: change}))


@pytest.mark.parametrize("copy", [copy_blocks, copy_blocks_mla])
def test_copy_blocks(copy):
    caches = [torch.randn(5, 4, 20), torch.randn(5, 4, 12).half()]
    before = [c.clone() for c in caches]
    copy(caches, torch.tensor([[1, 3], [3, 2]]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 1, 3, 1, 4]])


def test_copy_blocks_mla_takes_latents_alone():
    with pytest.raises(ValueError, match="kv_cache must have shape"):
        copy_blocks_mla([torch.zeros(5, 2, 4, 1, 8)], torch.tensor([[1, 2]]))


def test_swap_blocks():
    source, target = torch.randn(5, 4, 20), torch.zeros(3, 4, 20)
    swap_blocks(source, target, torch.tensor([[4, 0], [1, 2]]))
    assert torch.equal(target[[0, 2]], source[[4, 1]])
    assert (target[1] == 0).all()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "capability", "wanted"),
    [
        ("auto", (8, 0), True),
        ("fp8_e5m2", (8, 0), True),
        ("fp8_e4m3", (8, 0), False),
        ("fp8_e4m3", (8, 9), True),
    ],
)
def test_gpus_whose_triton_converts_no_e4m3_take_plain_pytorch(
    monkeypatch, kv_cache_dtype, capability, wanted
):
    device = torch.device("cuda", 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    converts_e4m3.cache_clear()
    cache = Mock(is_cuda=True, dtype=torch.uint8, device=device, **{"stride.return_value": 1})
    assert by_triton(cache, KV_CACHE_DTYPES[kv_cache_dtype]) is wanted
    converts_e4m3.cache_clear()
