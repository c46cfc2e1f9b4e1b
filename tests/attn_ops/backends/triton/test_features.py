"""ALiBi, sinks, FP8 caches, non-causal batches and log-sum-exp of the Triton kernels, interpreted.

T tokens, S requests, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from attn_ops import (
    AttentionOptions,
    CommonAttentionMetadata,
    attention_with_lse,
)
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.backends.triton import BACKEND
from attn_ops.metadata import KV_CACHE_DTYPES
from tests.kit.marks import slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
PREFILL = ([5, 0, 1, 37, 2, 1], [5, 0, 1, 70, 0, 41])  # query lengths and seq_lens
DECODE = ([1, 1, 0, 1, 1, 1], [1, 70, 9, 0, 135, 33])
BATCHES = pytest.mark.parametrize("lengths", [PREFILL, DECODE], ids=["prefill", "decode"])
FP8 = tuple(name for name, dtype in KV_CACHE_DTYPES.items() if dtype is not None)
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_PADDING_ROWS = 6, 2, 16, 3

SLOPES = torch.tensor([0.5, 0.25, 0.01, 1.0, 0.0, 0.003], device=DEVICE)
SINKS = torch.tensor([0.0, 3.0, -2.0, 40.0, -90.0, float("-inf")], device=DEVICE)
SCALES = {
    "k_scale": torch.tensor([1.7], device=DEVICE),
    "v_scale": torch.tensor([0.3], device=DEVICE),
}


@dataclasses.dataclass
class Case:
    """q [T, N, H], kv_cache [P, 2, B, K, H] and the batch."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    common: CommonAttentionMetadata


def make_case(
    lengths: tuple[list[int], list[int]],
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype = torch.float32,
    head_size: int = 16,
    causal: bool = True,
) -> Case:
    """Blocks are shuffled; what no token fills is NaN, in FP8 the byte 0x7f; so is padding of q.

    The interpreter converts 0x7f to 480 or 114688. A seq_len of 0 with query rows is a padding
    request of a captured batch.
    """
    generator = torch.Generator().manual_seed(0)
    query_lens, seq_lens = lengths
    width = max(-(-n // BLOCK_SIZE) for n in seq_lens) + 1
    num_blocks = len(seq_lens) * width + 1
    table_SM = (torch.randperm(num_blocks - 1, generator=generator) + 1).int().view(-1, width)
    shape = (num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, head_size)
    stored = KV_CACHE_DTYPES[kv_cache_dtype] or dtype
    kv_P2BKH = torch.randn(shape, generator=generator).to(stored)
    empty_PB = torch.ones(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    for request, num_cached in enumerate(seq_lens):
        for token in range(num_cached):
            empty_PB[table_SM[request, token // BLOCK_SIZE], token % BLOCK_SIZE] = False
    if stored != dtype:
        kv_P2BKH = kv_P2BKH.view(torch.uint8)
    poison = float("nan") if stored == dtype else 0x7F
    kv_P2BKH.masked_fill_(empty_PB[:, None, :, None, None], poison)
    num_rows = sum(query_lens) + NUM_PADDING_ROWS
    q_TNH = torch.randn(num_rows, NUM_HEADS, head_size, generator=generator).to(dtype)
    q_TNH[sum(query_lens) :] = float("nan")
    cached = [max(pair) for pair in zip(query_lens, seq_lens, strict=True)]
    common = CommonAttentionMetadata.from_lengths(
        query_lens, cached, table_SM, BLOCK_SIZE, DEVICE, num_padded_tokens=num_rows
    )
    seq_cpu = torch.tensor(seq_lens, dtype=torch.int32)
    common = common.replace(seq_lens=seq_cpu.to(DEVICE), seq_lens_cpu=seq_cpu, causal=causal)
    return Case(q_TNH.to(DEVICE), kv_P2BKH.to(DEVICE), common)


def build(case: Case, **options):
    """The case's metadata."""
    asked = AttentionOptions(case.q.shape[2] ** -0.5, **options)
    spec = asked.spec(case.q, case.kv_cache, case.common.causal)
    return BACKEND.builder(BACKEND, [spec], BLOCK_SIZE, DEVICE).build(0, case.common)


def check(case: Case, num_splits: int | None = None, **options) -> None:
    """Output and log-sum-exp against the float64 oracle; `num_splits` calls the decode kernel."""
    q, kv_cache, common = case.q, case.kv_cache, case.common
    scale = q.shape[2] ** -0.5
    if num_splits is None:
        out_TNH, lse_TN = attention_with_lse(q, kv_cache, build(case, **options), scale, **options)
    else:
        from attn_ops.backends.triton.decode import decode_attention

        lse_TN = torch.full(q.shape[:2], float("nan"), device=DEVICE)
        asked = AttentionOptions(scale, **options, lse=lse_TN)
        out_TNH = decode_attention(q, kv_cache, common, asked, num_splits)
    wanted_lse_TN = torch.full(q.shape[:2], float("nan"), dtype=torch.float64, device=DEVICE)
    wanted_TNH = reference_attention(
        q, kv_cache, common, scale, compute_dtype=torch.float64, lse=wanted_lse_TN, **options
    )
    tolerance = TOLERANCE[q.dtype]
    error_T = (out_TNH.double() - wanted_TNH).norm(dim=(1, 2)) / wanted_TNH.norm(dim=(1, 2))
    empty_T = (wanted_lse_TN == float("-inf")).all(1)
    assert (error_T[~empty_T] <= 4 * tolerance).all(), f"relative errors {error_T}"
    assert (out_TNH[empty_T] == 0).all()
    num_empty = NUM_PADDING_ROWS + int(common.query_lens[common.seq_lens == 0].sum())
    assert empty_T.sum() == num_empty
    torch.testing.assert_close(lse_TN.double(), wanted_lse_TN, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan():
    """`torch.empty` fills with NaN in deterministic mode: a row that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_non_causal_prompt_crosses_unmasked_tiles():
    case = make_case(([150], [200]), causal=False)
    check(case, sliding_window=90, alibi_slopes=SLOPES, sinks=SINKS)


@BATCHES
@pytest.mark.parametrize("kv_cache_dtype", FP8)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scales", [SCALES, *slow({})], ids=["scaled", "plain"])
def test_fp8_cache(lengths, kv_cache_dtype, dtype, scales):
    case = make_case(lengths, kv_cache_dtype, dtype)
    check(case, kv_cache_dtype=kv_cache_dtype, **scales)


@BATCHES
@pytest.mark.parametrize("name", SCALES)
def test_one_scale_alone(lengths, name):
    case = make_case(lengths, FP8[0])
    check(case, kv_cache_dtype=FP8[0], soft_cap=2.0, **{name: SCALES[name]})


@pytest.mark.parametrize("num_splits", [1, 2, *slow(7)])
@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": SLOPES},
        {"sinks": SINKS},
        {"sinks": SINKS, "sliding_window": 100, "causal": False},
        {"kv_cache_dtype": FP8[0], **SCALES},
        {"kv_cache_dtype": FP8[1], **SCALES, "sinks": SINKS, "alibi_slopes": SLOPES},
    ],
    ids=lambda options: "-".join(options),
)
def test_splits(num_splits, options):
    options = dict(options)
    causal = options.pop("causal", True)
    case = make_case(DECODE, options.get("kv_cache_dtype", "auto"), causal=causal)
    check(case, num_splits, **options)


FEATURES = {
    "alibi_slopes": SLOPES,
    "sinks": SINKS,
    "sliding_window": 30,
    "soft_cap": 2.0,
    "kv_cache_dtype": FP8[0],
}


@pytest.mark.parametrize("lengths", [PREFILL, *slow((DECODE,))], ids=["prefill", "decode"])
@pytest.mark.parametrize("pair", list(itertools.combinations(FEATURES, 2)), ids="-".join)
def test_pairs(lengths, pair):
    options = {name: FEATURES[name] for name in pair}
    if "kv_cache_dtype" in pair:
        options |= SCALES
    case = make_case(lengths, options.get("kv_cache_dtype", "auto"), causal=False)
    check(case, **options)


@BATCHES
@pytest.mark.parametrize("causal", [True, *slow(False)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_all_at_once(lengths, causal, dtype):
    case = make_case(lengths, FP8[0], dtype, head_size=80, causal=causal)
    check(case, **FEATURES, **SCALES)


@BATCHES
def test_views_of_larger_tensors(lengths):
    """A layer's slice of the model's slopes and sinks is aligned to 4 bytes only."""
    slopes, sinks = torch.cat([SLOPES, SLOPES])[1:7], torch.cat([SINKS, SINKS])[3:9]
    check(make_case(lengths), alibi_slopes=slopes, sinks=sinks)


def test_e4m3_is_refused_where_it_cannot_be_converted(monkeypatch):
    from attn_ops.backends import triton as backend

    monkeypatch.setattr(backend, "converts_e4m3", lambda device: False)
    with pytest.raises(ValueError, match="kv_cache_dtype must be supported by the GPU"):
        check(make_case(DECODE, "fp8_e4m3"), kv_cache_dtype="fp8_e4m3")
