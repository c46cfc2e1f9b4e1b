"""ALiBi, sinks, FP8 caches, non-causal batches and log-sum-exp of the Triton kernels, interpreted.

T tokens, S requests, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
import itertools

import pytest
import torch

from attn_ops import AttentionOptions, AttentionSpec, attention_with_lse
from attn_ops.backends.triton import BACKEND
from attn_ops.metadata import KV_CACHE_DTYPES
from tests.attn_ops.backends.paged import TOLERANCE, Paged, assert_right, make_paged
from tests.kit.marks import slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PREFILL = ([5, 0, 1, 37, 2, 1], [5, 0, 1, 70, 0, 41])  # query lengths and seq_lens
DECODE = ([1, 1, 0, 1, 1, 1], [1, 70, 9, 0, 135, 33])
BATCHES = pytest.mark.parametrize("lengths", [PREFILL, DECODE], ids=["prefill", "decode"])
FP8 = tuple(name for name, dtype in KV_CACHE_DTYPES.items() if dtype is not None)
pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")

SLOPES = torch.tensor([0.5, 0.25, 0.01, 1.0, 0.0, 0.003], device=DEVICE)
SINKS = torch.tensor([0.0, 3.0, -2.0, 40.0, -90.0, float("-inf")], device=DEVICE)
SCALES = {
    "k_scale": torch.tensor([1.7], device=DEVICE),
    "v_scale": torch.tensor([0.3], device=DEVICE),
}


def make_case(
    lengths: tuple[list[int], list[int]],
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype = torch.float32,
    head_size: int = 16,
    causal: bool = True,
) -> Paged:
    spec = AttentionSpec(6, 2, head_size, dtype, causal=causal, kv_cache_dtype=kv_cache_dtype)
    return make_paged(*lengths, spec, device=DEVICE)


def check(case: Paged, num_splits: int | None = None, **options) -> None:
    """Output and log-sum-exp against the float64 oracle; `num_splits` calls the decode kernel."""
    q, kv_cache, common = case
    asked = AttentionOptions(q.shape[2] ** -0.5, **options)
    if num_splits is None:
        spec = asked.spec(q, kv_cache, common.causal)
        meta = BACKEND.builder(BACKEND, [spec], 16, DEVICE).build(0, common)
        out_TNH, lse_TN = attention_with_lse(q, kv_cache, meta, asked.scale, **options)
    else:
        from attn_ops.backends.triton.decode import decode_attention

        lse_TN = torch.full(q.shape[:2], float("nan"), device=DEVICE)
        asked = dataclasses.replace(asked, lse=lse_TN)
        out_TNH = decode_attention(*case, asked, num_splits)
    assert_right(out_TNH, lse_TN, case, asked.scale, **options)


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
