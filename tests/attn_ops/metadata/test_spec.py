"""What `AttentionSpec` refuses."""

import pytest
import torch

from attn_ops import AttentionSpec, LatentShape


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 3), (4, 0), (1, 2)])
def test_heads_must_group(num_heads, num_kv_heads):
    with pytest.raises(
        ValueError, match=f"num_heads must be a multiple of num_kv_heads, got {num_heads}"
    ):
        AttentionSpec(num_heads, num_kv_heads, 8, torch.float32)


def test_soft_cap_must_be_finite():
    with pytest.raises(ValueError, match="soft_cap"):
        AttentionSpec(4, 2, 32, torch.float32, soft_cap=float("inf"))


LATENT = LatentShape(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)


def test_latent_layers_have_one_latent_a_token():
    spec = AttentionSpec.of_latent(4, LATENT, torch.bfloat16, kv_cache_dtype="fp8_e4m3")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (4, 1, 20)
    assert spec.cache_shape(3, 8) == (3, 8, 20)
    assert spec.cache_dtype == torch.uint8
    assert spec.block_size_of(torch.empty(3, 8, 20)) == 8
    plain = AttentionSpec(4, 2, 20, torch.float32)
    assert plain.cache_shape(3, 8) == (3, 2, 8, 2, 20)
    assert plain.block_size_of(torch.empty(3, 2, 8, 2, 20)) == 8


@pytest.mark.parametrize(
    ("heads", "size", "message"),
    [(2, 20, "num_kv_heads must be 1 with"), (1, 24, "head_size must be 20 with")],
)
def test_latent_geometry_fits_the_cache(heads, size, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(4, heads, size, torch.float32, latent=LATENT)


@pytest.mark.parametrize("field", ["kv_lora_rank", "qk_nope_head_dim", "v_head_dim"])
@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_latent_sizes_are_at_least_one(field, size):
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        LatentShape(**(sizes | {field: size}))


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size must be None or at least 1, got 0"),
        (
            {"attention_chunk_size": 8, "sliding_window": 3},
            "sliding_window must be None with attention_chunk_size 8, got 3",
        ),
        (
            {"attention_chunk_size": 8, "causal": False},
            "causal must be True with attention_chunk_size 8, got False",
        ),
        ({"blocksparse": 0}, "blocksparse must be None or at least 1, got 0"),
        (
            {"blocksparse": 16, "sliding_window": 5},
            "sliding_window must be None with blocksparse 16, got 5",
        ),
        (
            {"blocksparse": 16, "attention_chunk_size": 32},
            "attention_chunk_size must be None with blocksparse 16",
        ),
        (
            {"blocksparse": 16, "causal": False},
            "causal must be True with blocksparse 16, got False",
        ),
    ],
)
def test_geometry_that_does_not_go_together(geometry, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(4, 2, 8, torch.float32, **geometry)
