"""The Triton prefill kernel's ways to its keys: consecutive rows, gathered rows, split ranges.

T rows, S requests, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from attn_ops import AttentionOptions, AttentionSpec
from attn_ops.metadata import KV_CACHE_DTYPES
from tests.attn_ops.backends.paged import Paged, assert_right, make_paged
from tests.kit.marks import long

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = [5, 0, 1, 70, 130]
SLOPES = torch.tensor([0.5, 0.25, 0.01, 1.0, 0.0, 0.003], device=DEVICE)
SINKS = torch.tensor([0.0, 3.0, -2.0, 40.0, -90.0, float("-inf")], device=DEVICE)
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 20},
        {"soft_cap": 2.0},
        {"alibi_slopes": SLOPES, "sliding_window": 90},
        {"sinks": SINKS},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
SLOW = pytest.mark.slow
CAUSAL = pytest.mark.parametrize("causal", [True, False])


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    causal: bool = True,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
) -> Paged:
    spec = AttentionSpec(6, 2, head_size, dtype, causal=causal, kv_cache_dtype=kv_cache_dtype)
    return make_paged(query_lens, seq_lens, spec, device=DEVICE)


def check_varlen(q, k, v, causal: bool, scale: float = 0.25, **options) -> None:
    """`varlen_attention` against the oracle on a cache that holds the same keys."""
    from attn_ops.backends.triton.prefill import varlen_attention

    _, kv_P2BKH, common = make_case(LENGTHS, LENGTHS, causal, q.shape[2], q.dtype)
    slots = common.slot_mapping[: sum(LENGTHS)]
    for which, values in enumerate((k, v)):
        kv_P2BKH[slots // 16, which, slots % 16] = values[: sum(LENGTHS)]
    lse = torch.full(q.shape[:2], float("nan"), device=DEVICE)
    out = varlen_attention(q, k, v, common, AttentionOptions(scale, **options, lse=lse))
    assert_right(out, lse, (q, kv_P2BKH, common), scale, **options)


def make_qkv() -> Sequence[torch.Tensor]:
    """q [T, N, H], k and v [T, K, H], parts of one product; padding rows are NaN."""
    merged = torch.randn(sum(LENGTHS) + 3, 10, 16)
    merged[-3:] = float("nan")
    return merged.to(DEVICE).split([6, 2, 2], dim=1)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=SLOW)])
@OPTIONS
def test_varlen_options(causal, options):
    check_varlen(*make_qkv(), causal, **options)


def test_varlen_strides_of_k_and_v_differ():
    q, k, v = make_qkv()
    check_varlen(q, k.contiguous(), v, False)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_not_above_zero(scale):
    check_varlen(*make_qkv(), True, scale=scale)


def check_launch(launch, case: Paged, **options) -> None:
    from attn_ops.backends.triton.prefill import prefill_attention

    lse = torch.full(case[0].shape[:2], float("nan"), device=DEVICE)
    asked = AttentionOptions(0.25, **options, lse=lse)
    assert_right(prefill_attention(*case, asked, launch), lse, case, 0.25, **options)


@CAUSAL
@OPTIONS
@pytest.mark.parametrize(("tile", "heads"), [(64, 2), pytest.param(32, None, marks=SLOW)])
def test_gathered_keys(causal, options, tile, heads):
    from attn_ops.backends.triton.prefill import Launch

    case = make_case([5, 0, 1, 70], [5, 0, 40, 130], causal)
    check_launch(Launch(32, tile, 4, 1, heads, gather=True, heads_first=True), case, **options)


@pytest.mark.parametrize("head_size", [80, 128])
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_gathered_dtypes(head_size, kv_cache_dtype):
    from attn_ops.backends.triton.prefill import Launch

    case = make_case([9, 70], [50, 130], True, head_size, torch.bfloat16, kv_cache_dtype)
    options = {}
    if kv_cache_dtype != "auto":
        half = torch.tensor([0.5], device=DEVICE)
        options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": half, "v_scale": half}
    check_launch(Launch(64, 64, 4, 2, gather=True), case, **options)


SPLITS = [(2, True, True)]
"""Number of splits, loads ahead, causal."""
OTHER_SPLITS = sorted({(n, a, c) for n in (2, 7) for a in (0, 1) for c in (0, 1)} - set(SPLITS))


@OPTIONS
@pytest.mark.parametrize(
    ("num_splits", "ahead", "causal"),
    [*SPLITS, *long(*OTHER_SPLITS)],
)
def test_split_keys(options, num_splits, ahead, causal):
    from attn_ops.backends.triton.prefill import Launch

    case = make_case([4, 0, 1, 4, 3], [4, 0, 40, 130, 99], bool(causal))
    launch = Launch(16, 16, 4, 1, ahead=bool(ahead), num_splits=num_splits)
    check_launch(launch, case, **options)


def test_number_of_splits():
    from attn_ops.backends.triton.prefill import MAX_SPLITS, Launch, choose_num_splits

    launch = Launch(128, 64, 8, 3)
    q = torch.empty(1, device=DEVICE)
    common = make_case([4, 4], [1000, 2000])[2]
    few = dataclasses.replace(common, max_seq_len=100_000)
    assert 1 <= choose_num_splits(launch, 4, 8, few, q) <= MAX_SPLITS
    short = dataclasses.replace(common, max_seq_len=100)
    assert choose_num_splits(launch, 4, 8, short, q) == 1
    long = dataclasses.replace(few, max_query_len=17)
    assert choose_num_splits(launch, 4, 8, long, q) == 1
