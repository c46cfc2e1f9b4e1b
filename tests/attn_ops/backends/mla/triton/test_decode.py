"""The decode kernel of latent attention against float64; without a GPU it runs interpreted."""

import pytest
import torch

from attn_ops.backends.triton import BACKEND
from tests.attn_ops.backends.mla.triton.reference import TOLERANCE, assert_near, make_case
from tests.kit.marks import long, slow

pytestmark = [
    pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET"),
    pytest.mark.usefixtures("uninitialized_memory_is_nan"),
]

DECODE = ([1, 1, 0, 1, 1], [1, 70, 9, 0, 203])
DRAFTS = ([3, 3, 3, 3], [3, 70, 2, 131])
RAGGED = ([1, 4, 0, 2], [40, 90, 3, 2])
BATCHES = {"decode": DECODE, "drafts": DRAFTS, "ragged": RAGGED}


def check(case, tolerance: float | None = None, **launch) -> None:
    from attn_ops.backends.mla.triton.decode import mla_decode

    wanted, wanted_lse = case.wanted()
    lse = torch.empty(wanted_lse.shape, device=case.q_pe.device)
    out = mla_decode(*case.inputs, **case.options, lse=lse, **launch)
    assert out.dtype == case.q_pe.dtype
    assert out.is_contiguous()
    tolerance = tolerance or TOLERANCE[out.dtype]
    assert_near(out, wanted, tolerance)
    torch.testing.assert_close(lse.double().cpu(), wanted_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_splits", [1, 3, None])
def test_splits(batch, num_splits):
    check(make_case(*BATCHES[batch]), num_splits=num_splits)


@pytest.mark.parametrize("num_heads", [1, 5, 16, *long(40, 128)])
@pytest.mark.parametrize("batch", ["decode", "drafts"])
def test_heads(num_heads, batch):
    """Fewer than the rows of a tile, and more."""
    check(make_case(*BATCHES[batch], num_heads=num_heads), num_splits=2)


@pytest.mark.parametrize(
    ("latent", "rope"), [(24, 8), (12, 4), (64, 32), *slow((512, 64), (256, 32))]
)
def test_sizes(latent, rope):
    check(make_case(*RAGGED, latent=latent, rope=rope), num_splits=2)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16, torch.float32)])
def test_fp8(kv_cache_dtype, dtype):
    """Within the error of the products: the reference reads the same stored values."""
    check(make_case(*RAGGED, dtype=dtype, kv_cache_dtype=kv_cache_dtype), num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("batch", ["decode", "drafts"])
def test_transposed_products(batch, num_splits):
    from attn_ops.backends.mla.triton.launch import DecodeLaunch

    launch = DecodeLaunch(16, 64, 4, 2, swap=True)
    check(make_case(*BATCHES[batch], num_heads=16), num_splits=num_splits, launch=launch)


def test_a_captured_launch_is_right_for_longer_requests():
    """`max_seq_len` only chooses how many ranges there are."""
    case = make_case(*DECODE)
    case.options["max_seq_len"] = 64
    check(case)


def test_many_splits():
    """More ranges than are merged at a time, most of them empty."""
    check(make_case([1, 1], [203, 30]), num_splits=70)


@pytest.mark.parametrize(
    ("programs", "max_keys", "slots", "wanted"),
    [
        (64, 8192, 264, 4),
        (256, 1024, 264, 1),
        (1, 65536, 264, 128),
        (1, 100, 264, 3),
        (100, 8192, 264, 5),  # 2 ranges leave 64 slots idle, 5 fill two waves nearly
    ],
)
def test_choice_of_splits(programs, max_keys, slots, wanted):
    from attn_ops.backends.mla.triton.launch import choose_num_splits

    assert choose_num_splits(programs, max_keys, slots) == wanted


@pytest.mark.parametrize(
    ("latent", "small", "keys"), [(512, False, 64), (512, True, 32), (1024, False, 32)]
)
def test_tiles_that_fit_into_shared_memory(latent, small, keys):
    from attn_ops.backends.mla.triton.launch import decode_launch

    assert decode_launch(16, torch.bfloat16, False, latent, small).keys == keys
