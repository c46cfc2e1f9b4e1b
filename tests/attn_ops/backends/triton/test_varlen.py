"""The Triton prefill kernel's ways to its keys: consecutive rows, gathered rows, split ranges.

T rows, S requests, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from attn_ops import AttentionOptions, CommonAttentionMetadata
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.metadata import KV_CACHE_DTYPES
from tests.kit.marks import long

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
LENGTHS = [5, 0, 1, 70, 130]
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_PADDING_ROWS = 6, 2, 16, 3
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


def make_batch(
    query_lens: list[int], seq_lens: list[int], causal: bool
) -> tuple[CommonAttentionMetadata, int]:
    """The batch with a shuffled block table, and the blocks of its cache; block 0 is not used."""
    width = max(-(-n // BLOCK_SIZE) for n in seq_lens) + 1
    num_blocks = len(seq_lens) * width + 1
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
    num_rows = sum(query_lens) + NUM_PADDING_ROWS
    common = CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, order.int().view(-1, width), BLOCK_SIZE, DEVICE,
        num_padded_tokens=num_rows,
    )  # fmt: skip
    return dataclasses.replace(common, causal=causal), num_blocks


def randn(*shape: int, dtype: torch.dtype, num_padding_rows: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    if num_padding_rows:
        values[-num_padding_rows:] = float("nan")
    return values.to(DEVICE)


def make_paged(
    query_lens: list[int],
    seq_lens: list[int],
    causal: bool,
    head_size: int,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, CommonAttentionMetadata]:
    """q [T, N, H], kv_cache [P, 2, B, K, H] and the batch; what no token fills is NaN."""
    common, num_blocks = make_batch(query_lens, seq_lens, causal)
    num_rows = common.slot_mapping.shape[0]
    q = randn(num_rows, NUM_HEADS, head_size, dtype=dtype, num_padding_rows=NUM_PADDING_ROWS)
    kv = randn(num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, head_size, dtype=dtype)
    empty_PB = torch.ones(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    for request, seq_len in enumerate(seq_lens):
        for token in range(seq_len):
            block = common.block_table_tensor[request, token // BLOCK_SIZE]
            empty_PB[block, token % BLOCK_SIZE] = False
    empty = empty_PB[:, None, :, None, None].to(DEVICE)
    if stored is not None:
        return q, kv.to(stored).view(torch.uint8).masked_fill_(empty, 0x7F), common
    return q, kv.masked_fill_(empty, float("nan")), common


def assert_right(out_TNH, lse_TN, q, kv_cache, common, options, scale) -> None:
    """Within TOLERANCE of the float64 oracle; rows without keys are zero."""
    wanted_lse_TN = torch.full(lse_TN.shape, float("nan"), dtype=torch.float64, device=DEVICE)
    wanted_TNH = reference_attention(
        q, kv_cache, common, scale, compute_dtype=torch.float64, lse=wanted_lse_TN, **options
    )
    tolerance = TOLERANCE[q.dtype]
    error = (out_TNH.double() - wanted_TNH).norm() / wanted_TNH.norm()
    assert error <= tolerance, f"relative error {error:.2e}"
    empty_T = (wanted_lse_TN == float("-inf")).all(1)
    assert (out_TNH[empty_T] == 0).all()
    torch.testing.assert_close(lse_TN.double(), wanted_lse_TN, atol=tolerance, rtol=tolerance)


def check_varlen(q, k, v, causal: bool, scale: float = 0.25, **options) -> None:
    """`varlen_attention` against the oracle on a cache that holds the same keys."""
    from attn_ops.backends.triton.prefill import varlen_attention

    common, num_blocks = make_batch(LENGTHS, LENGTHS, causal)
    shape = (num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, q.shape[2])
    kv_P2BKH = torch.zeros(shape, dtype=q.dtype, device=DEVICE)
    slots = common.slot_mapping[: sum(LENGTHS)]
    for which, values in enumerate((k, v)):
        kv_P2BKH[slots // BLOCK_SIZE, which, slots % BLOCK_SIZE] = values[: sum(LENGTHS)]
    lse = torch.full(q.shape[:2], float("nan"), device=DEVICE)
    out = varlen_attention(q, k, v, common, AttentionOptions(scale, **options, lse=lse))
    assert out.is_contiguous()
    assert_right(out, lse, q, kv_P2BKH, common, options, scale)


def make_qkv(head_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, N, H], k and v [T, K, H]; padding rows are NaN."""
    num_rows, num_heads = sum(LENGTHS) + NUM_PADDING_ROWS, NUM_HEADS + 2 * NUM_KV_HEADS
    merged = randn(num_rows, num_heads, head_size, dtype=dtype, num_padding_rows=NUM_PADDING_ROWS)
    q, k, v = merged.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    return q, k, v


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=SLOW)])
@OPTIONS
def test_varlen_options(causal, options):
    check_varlen(*make_qkv(16, torch.float32), causal, **options)


def test_varlen_strides_of_k_and_v_differ():
    q, k, v = make_qkv(16, torch.float32)
    check_varlen(q, k.contiguous(), v, False)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_not_above_zero(scale):
    check_varlen(*make_qkv(16, torch.float32), True, scale=scale)


def check_launch(launch, case, **options) -> None:
    from attn_ops.backends.triton.prefill import prefill_attention

    q, kv_cache, common = case
    lse = torch.full(q.shape[:2], float("nan"), device=DEVICE)
    asked = AttentionOptions(0.25, **options, lse=lse)
    out = prefill_attention(q, kv_cache, common, asked, launch)
    assert_right(out, lse, q, kv_cache, common, options, 0.25)


@CAUSAL
@OPTIONS
@pytest.mark.parametrize(("tile", "heads"), [(64, 2), pytest.param(32, None, marks=SLOW)])
def test_gathered_keys(causal, options, tile, heads):
    from attn_ops.backends.triton.prefill import Launch

    case = make_paged([5, 0, 1, 70], [5, 0, 40, 130], causal, 16, torch.float32)
    check_launch(Launch(32, tile, 4, 1, heads, gather=True, heads_first=True), case, **options)


@pytest.mark.parametrize("head_size", [80, 128])
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_gathered_dtypes(head_size, kv_cache_dtype):
    from attn_ops.backends.triton.prefill import Launch

    stored = KV_CACHE_DTYPES[kv_cache_dtype]
    case = make_paged([9, 70], [50, 130], True, head_size, torch.bfloat16, stored)
    options = {}
    if stored is not None:
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

    case = make_paged([4, 0, 1, 4, 3], [4, 0, 40, 130, 99], bool(causal), 16, torch.float32)
    launch = Launch(16, 16, 4, 1, ahead=bool(ahead), num_splits=num_splits)
    check_launch(launch, case, **options)


def test_number_of_splits():
    from attn_ops.backends.triton.prefill import MAX_SPLITS, Launch, choose_num_splits

    launch = Launch(128, 64, 8, 3)
    q = torch.empty(1, device=DEVICE)
    common, _ = make_batch([4, 4], [1000, 2000], True)
    few = dataclasses.replace(common, max_seq_len=100_000)
    assert 1 <= choose_num_splits(launch, 4, 8, few, q) <= MAX_SPLITS
    short = dataclasses.replace(common, max_seq_len=100)
    assert choose_num_splits(launch, 4, 8, short, q) == 1
    long = dataclasses.replace(few, max_query_len=17)
    assert choose_num_splits(launch, 4, 8, long, q) == 1
