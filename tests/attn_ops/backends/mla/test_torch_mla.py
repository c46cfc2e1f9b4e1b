"""TORCH_MLA: both algorithms of the reference against plain attention, and the operator."""

import pytest
import torch

from attn_ops import mla_attention, mla_attention_with_lse
from attn_ops.backends.mla.torch_mla import reference_mla_attention
from tests.kit.latent import build_latent_batch

RAGGED = ([3, 0, 1, 1, 5], [7, 5, 1, 9, 5])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def by_hand(b) -> torch.Tensor:
    """[T, N, V] float64: request by request, head by head, over keys and values made by `kv_b`."""
    out = torch.zeros(*b.q.shape[:2], b.shape.v_head_dim, dtype=torch.float64)
    starts, lengths = b.common.query_start_loc.tolist(), b.common.seq_lens.tolist()
    weights = b.kv_b.double().view(b.q.shape[1], -1, b.shape.kv_lora_rank)
    cache = b.options().kv_cache_dtype
    for request, length in enumerate(lengths):
        blocks = b.common.block_table_tensor[request].long()
        latent = b.kv_cache[blocks].flatten(0, 1)[:length]
        if cache != "auto":
            latent = latent.view(getattr(torch, f"float8_{cache.removeprefix('fp8_')}fn"))
            latent = latent.double() * 0.5
        c, k_pe = latent.double().split([b.shape.kv_lora_rank, b.shape.qk_rope_head_dim], -1)
        for row in range(starts[request], starts[request + 1]):
            seen = length - (starts[request + 1] - row) + 1
            for head, weight in enumerate(weights):
                k_nope, v = (c[:seen] @ weight.t()).split(
                    [b.shape.qk_nope_head_dim, b.shape.v_head_dim], -1
                )
                scores = torch.cat([k_nope, k_pe[:seen]], -1) @ b.q[row, head].double()
                out[row, head] = (b.scale * scores).softmax(0) @ v
    return out


@pytest.mark.parametrize("algorithm", ["absorbed", "up-projected"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_the_reference_is_attention_over_the_keys_that_latents_stand_for(algorithm, kv_cache_dtype):
    b = build_latent_batch(
        *RAGGED, dtype=torch.float64, num_padding_rows=2, kv_cache_dtype=kv_cache_dtype
    )
    lse = torch.empty(b.q.shape[:2])
    options = b.options(lse=lse)
    out = reference_mla_attention(b.q, b.kv_cache, b.common, options, algorithm=algorithm)
    torch.testing.assert_close(out, by_hand(b), rtol=1e-12, atol=1e-12)
    assert (lse[10:] == float("-inf")).all()


def test_both_algorithms_give_one_log_sum_exp():
    b = build_latent_batch(*RAGGED, dtype=torch.float64)
    found = []
    for algorithm in ("absorbed", "up-projected"):
        lse = torch.empty(b.q.shape[:2], dtype=torch.float64)
        reference_mla_attention(b.q, b.kv_cache, b.common, b.options(lse=lse), algorithm=algorithm)
        found.append(lse)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_operator(dtype):
    b = build_latent_batch(*RAGGED, dtype=dtype, num_padding_rows=2)
    want = by_hand(b)
    out = mla_attention(*b.arguments, **b.keywords)
    assert (out.dtype, out.shape) == (dtype, (12, 3, 5))
    assert (out.double() - want).norm() <= TOLERANCE[dtype] * want.norm()
    assert (out[10:] == 0).all()
    again, lse = mla_attention_with_lse(*b.arguments, **b.keywords)
    assert torch.equal(again, out)
    reference = torch.empty(b.q.shape[:2])
    reference_mla_attention(b.q, b.kv_cache, b.common, b.options(lse=reference))
    torch.testing.assert_close(lse, reference, rtol=1e-4, atol=5e-2)


def test_new_weights_count_at_once():
    b = build_latent_batch(*RAGGED, dtype=torch.float64)
    mla_attention(*b.arguments, **b.keywords)
    b.kv_b.mul_(0.5)
    out = mla_attention(*b.arguments, **b.keywords)
    torch.testing.assert_close(out, by_hand(b), rtol=1e-12, atol=1e-12)
