"""What `AttentionSpec` refuses."""

import pytest
import torch

from attn_ops import AttentionSpec


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 3), (4, 0), (1, 2)])
def test_heads_must_group(num_heads, num_kv_heads):
    with pytest.raises(
        ValueError, match=f"num_heads must be a multiple of num_kv_heads, got {num_heads}"
    ):
        AttentionSpec(num_heads, num_kv_heads, 8, torch.float32)


def test_soft_cap_must_be_finite():
    with pytest.raises(ValueError, match="soft_cap"):
        AttentionSpec(4, 2, 32, torch.float32, soft_cap=float("inf"))
