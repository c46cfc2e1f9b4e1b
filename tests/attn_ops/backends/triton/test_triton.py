"""The Triton kernels against the float64 oracle; without a GPU they run interpreted.

T tokens, S requests, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from attn_ops import (
    AttentionOptions,
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
)
from attn_ops.backends.triton import BACKEND
from tests.attn_ops.backends.paged import Paged, assert_right, make_paged
from tests.kit.marks import slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PREFILL = ([5, 0, 1, 37, 1], [5, 0, 1, 90, 71])  # query lengths and seq_lens
DECODE = ([1, 1, 0, 1, 1], [1, 70, 9, 0, 203])
pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


def make_case(
    lengths: tuple[list[int], list[int]],
    num_heads: int = 4,
    num_kv_heads: int = 1,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    num_padding_rows: int = 3,
) -> Paged:
    spec = AttentionSpec(num_heads, num_kv_heads, head_size, dtype, causal=causal)
    return make_paged(*lengths, spec, num_padding_rows=num_padding_rows, device=DEVICE)


def build(common: CommonAttentionMetadata, q: torch.Tensor, kv_cache: torch.Tensor):
    spec = AttentionSpec(q.shape[1], kv_cache.shape[3], q.shape[2], q.dtype)
    return BACKEND.builder(BACKEND, [spec], kv_cache.shape[2], DEVICE).build(0, common)


def run(q, kv_cache, common, **options) -> torch.Tensor:
    return attention(q, kv_cache, build(common, q, kv_cache), q.shape[2] ** -0.5, **options)


def check(case: Paged, **options) -> None:
    assert_right(run(*case, **options), None, case, case[0].shape[2] ** -0.5, **options)


@pytest.mark.parametrize("lengths", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("sliding_window", [None, 7, *slow(1, 64, 1000)])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("causal", [True, False])
def test_window_soft_cap_and_causality(lengths, sliding_window, soft_cap, causal):
    case = make_case(lengths, causal=causal)
    check(case, sliding_window=sliding_window, soft_cap=soft_cap)


@pytest.mark.parametrize("sliding_window", [None, 5, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_long_prompts_cross_unmasked_tiles(sliding_window, causal):
    case = make_case(([150, 90], [150, 300]), 2, 1, dtype=torch.bfloat16, causal=causal)
    check(case, sliding_window=sliding_window)


@pytest.mark.parametrize("num_splits", [1, 17, *slow(2, 3, 7)])
@pytest.mark.parametrize("sliding_window", [100, *slow(None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_splits_of_decode(num_splits, sliding_window, dtype):
    from attn_ops.backends.triton.decode import decode_attention

    case = make_case(DECODE, 8, 2, 80, dtype=dtype)
    options = AttentionOptions(80**-0.5, sliding_window)
    out = decode_attention(*case, options, num_splits)
    assert_right(out, None, case, 80**-0.5, sliding_window=sliding_window)


def test_groups_larger_than_a_program():
    for lengths in (PREFILL, DECODE):
        check(make_case(lengths, 35, 1))


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_replayed_lengths_come_from_the_device(kind):
    """Under replay the host's ints and mirrors are the capture's: only device tensors may count."""
    captured = {"prefill": ([40, 9, 6], [200, 90, 6]), "decode": ([1, 1, 1], [200, 90, 6])}[kind]
    replayed = {"prefill": ([3, 30, 0], [3, 200, 0]), "decode": ([1, 1, 0], [3, 170, 0])}[kind]
    q, kv_cache, now = make_case(replayed, num_padding_rows=sum(captured[0]) - sum(replayed[0]))
    _, _, then = make_case(captured)
    frozen = dataclasses.replace(
        then,
        query_start_loc=now.query_start_loc,
        seq_lens=now.seq_lens,
        block_table_tensor=now.block_table_tensor,
    )
    assert_right(run(q, kv_cache, frozen), None, (q, kv_cache, now), 0.25)


@pytest.mark.parametrize("lengths", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_strided_inputs(lengths):
    q, kv_cache, common = make_case(lengths, 4, 2)
    merged_TNH = torch.cat(
        [torch.full_like(q, float("nan")), q, q], dim=1
    )  # as a slice of a merged qkv product
    kv_2PKBH = kv_cache.permute(1, 0, 3, 2, 4).contiguous()
    out = run(merged_TNH[:, 4:8], kv_2PKBH.permute(1, 0, 3, 2, 4), common)
    assert_right(out, None, (q, kv_cache, common), 0.25)


def test_number_of_splits():
    from attn_ops.backends.triton.decode_parts import MAX_SPLITS, choose_num_splits

    assert choose_num_splits(num_programs=8, max_keys=100_000, multiprocessors=132) == MAX_SPLITS
    assert choose_num_splits(num_programs=8, max_keys=32, multiprocessors=132) == 1
    assert choose_num_splits(num_programs=8, max_keys=1024, multiprocessors=132) == 32
    assert choose_num_splits(num_programs=64, max_keys=4096, multiprocessors=132) == 8
    assert choose_num_splits(num_programs=10_000, max_keys=8192, multiprocessors=132) == 1
    # FP8: more programs, but only of long ranges.
    assert choose_num_splits(512, 8192, 132, long_programs_per_sm=16) == 4
    assert choose_num_splits(64, 4096, 132, long_programs_per_sm=16) == 8
    assert choose_num_splits(num_programs=0, max_keys=0, multiprocessors=132) == 1


def without_mirrors(common: CommonAttentionMetadata, num_reqs: int, **changes):
    """The first requests, as a captured step knows them."""
    return common.replace(
        num_reqs=num_reqs, query_start_loc=common.query_start_loc[: num_reqs + 1],
        query_start_loc_cpu=None, num_computed_tokens_cpu=None, seq_lens_cpu=None,
        seq_lens=common.seq_lens[:num_reqs],
        block_table_tensor=common.block_table_tensor[:num_reqs], **changes,
    )  # fmt: skip


def test_number_of_requests_that_splits_are_chosen_for():
    """Of a captured step with prompts few have a query; how many, a replay's tensor says."""
    from attn_ops.backends.triton.decode_parts import expected_reqs

    _, _, common = make_case(([1] * 17, [5] * 17))
    assert expected_reqs(common) == 17
    assert expected_reqs(common.replace(num_actual_tokens=5)) == 5  # the others are padding
    assert expected_reqs(common.replace(num_actual_tokens=0)) == 2  # a capture's first run
    count = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    for num_reqs, wanted in ((17, 2), (3, 1)):
        assert expected_reqs(without_mirrors(common, num_reqs, num_logits=count)) == wanted


def test_parts_are_bounded():
    from attn_ops.backends.triton.decode_parts import MAX_PARTS_BYTES, num_splits_of

    _, _, common = make_case(([1] * 300, [5] * 300))
    limits = {"multiprocessors": 132, "long_programs_per_sm": 4}
    for num_reqs in (1, 17, 65, 257, 300):
        part = without_mirrors(common, num_reqs, num_actual_tokens=1)
        for row_bytes in (2**14, 2**16, 2**20):
            num_splits = num_splits_of(part, 32768, 8, row_bytes, **limits)
            whole = num_splits_of(part.replace(num_actual_tokens=300), 32768, 8, 2**14, **limits)
            assert num_splits >= whole
            assert num_splits == whole or num_splits * num_reqs * row_bytes <= MAX_PARTS_BYTES
    part = without_mirrors(common, 17, num_actual_tokens=1)
    assert num_splits_of(part, 4096, 8, 2**14, **limits) == 33


@pytest.mark.parametrize("num_logits", [None, 1])
def test_keys_of_few_requests_among_many_are_split(monkeypatch, num_logits):
    """As on a GPU of 132 multiprocessors; the result is that of one range."""
    from attn_ops.backends.triton import decode

    lengths = ([1] + [0] * 16, [200] + [0] * 16)
    q, kv_cache, common = make_case(lengths, num_padding_rows=16)
    if num_logits:
        count = torch.tensor([num_logits], dtype=torch.int32, device=DEVICE)
        common = common.replace(num_logits=count)
    made, parts = [], decode.empty_parts

    def noted(out, num_items, num_splits, heads, head_size):
        made.append(num_splits)
        return parts(out, num_items, num_splits, heads, head_size)

    monkeypatch.setattr(decode, "empty_parts", noted)
    monkeypatch.setattr(decode, "num_sms", lambda device: 132)
    options = AttentionOptions(scale=0.25)
    out = decode.decode_attention(q, kv_cache, common, options)
    assert made == [7], "200 keys, 32 a range"
    whole = decode.decode_attention(q, kv_cache, common, options, num_splits=1)
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, kv: (q.double(), kv), "cache's dtype torch.float32, got torch.float64"),
        (lambda q, kv: (q, kv.half()), "cache's dtype torch.float16, got torch.float32"),
        (lambda q, kv: (q.mT.contiguous().mT, kv), "stride of q's last dimension"),
    ],
)
def test_refusals(change, message):
    q, kv_cache, common = make_case(DECODE)
    meta = build(common, q, kv_cache)
    with pytest.raises(ValueError, match=message):
        attention(*change(q, kv_cache), meta, 1.0)


def test_cpu_is_refused_without_the_interpreter(monkeypatch):
    q, kv_cache, common = (x.cpu() if isinstance(x, torch.Tensor) else x for x in make_case(DECODE))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from attn_ops.backends.triton import forward

    with pytest.raises(ValueError, match="device must be cuda unless TRITON_INTERPRET=1"):
        forward(q, kv_cache, build(common, q, kv_cache), AttentionOptions(1.0))


@pytest.mark.slow
def test_declaration_needs_no_triton():
    code = """
import sys
sys.modules["triton"] = None
from attn_ops.backends.triton import BACKEND
print(BACKEND.unavailable())
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    for interpreted, reason in (
        ({}, "TRITON needs a CUDA device"),
        ({"TRITON_INTERPRET": "1"}, "triton must be installed"),
    ):
        said = subprocess.check_output(
            [sys.executable, "-c", code], env=environment | interpreted, text=True
        )
        assert said.startswith(reason)
