"""vLLM's rule for cascade attention, against cases computed by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from attn_ops import get_backend
from attn_ops.metadata import AttentionSpec

LLAMA_8B = (32, 8)
"""Query and kv heads; an H100 has 132 multiprocessors."""


def pays(length, query_lens, heads=LLAMA_8B, features=(False, False, False), num_sms=132):
    spec = AttentionSpec(4, 2, 8, torch.float32)
    backend = get_backend("TORCH")
    builder = backend.builder(backend, [spec], 4, "cpu")
    return builder.use_cascade_attention(length, np.array(query_lens), *heads, *features, num_sms)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((256, [2] * 8), True),
        ((255, [2] * 8), False),
        ((256, [2] * 7), False),
        ((256, [1] * 7 + [5]), True),
        ((256, [1] * 8, (32, 32)), True),
        ((256, [1] * 7, (32, 32)), False),
    ],
    ids=["least", "short", "few", "mixed", "no groups", "no groups, few"],
)
def test_batches_without_the_estimate(arguments, wanted):
    """Longer queries, or one query head a kv head: length and number alone decide."""
    assert pays(*arguments) is wanted


@pytest.mark.parametrize("feature", range(3), ids=["alibi", "sliding window", "local attention"])
def test_layers_must_see_all_keys(feature):
    assert pays(256, [2] * 8, features=tuple(i == feature for i in range(3))) is False


@pytest.mark.parametrize(
    ("length", "num_reqs", "heads", "num_sms", "wanted"),
    [
        # 2 key tiles. Cascade: 32 programs, 1 wave of 2. Split: 8 * 8 * 2 = 128 programs, 1 wave.
        (256, 8, LLAMA_8B, 132, False),
        # Split: 16 * 8 * 2 = 256, 2 waves; 17: 272, 3 waves.
        (256, 16, LLAMA_8B, 132, False),
        (256, 17, LLAMA_8B, 132, True),
        # 3 key tiles from 257 on. Split: 17 * 8 * 3 = 408, 4 waves; 16: 384, 3 waves.
        (257, 17, LLAMA_8B, 132, True),
        (257, 16, LLAMA_8B, 132, False),
        # 16 key tiles. Split: 16 * 8 * 16 = 2,048, 16 waves; 17: 2,176, 17 waves.
        (2048, 16, LLAMA_8B, 132, False),
        (2048, 17, LLAMA_8B, 132, True),
        # Cascade: 32 heads on 31 multiprocessors, 2 waves of 2. Split: 8: 128, 5 waves.
        (256, 8, LLAMA_8B, 31, True),
        # 129 rows are 2 query tiles: 64 programs on 32, 2 waves of 2. Split: 129 * 2 = 258, 9.
        (256, 129, (32, 1), 32, True),
        # 200 heads of a kv head are 2 query tiles. Cascade: 200 programs, 2 waves of 2.
        # Split: 100 * 2 * 2 = 400, 4 waves; 101: 404, 5 waves.
        (256, 100, (200, 1), 100, False),
        (256, 101, (200, 1), 100, True),
    ],
)
def test_single_token_batches_by_the_estimate(length, num_reqs, heads, num_sms, wanted):
    assert pays(length, [1] * num_reqs, heads, num_sms=num_sms) is wanted


@pytest.mark.parametrize("missing", ["lse", "non_causal"])
def test_a_backend_must_be_able_to(missing):
    backend = get_backend("TORCH")
    unable = dataclasses.replace(
        backend, support=dataclasses.replace(backend.support, **{missing: False})
    )
    builder = unable.builder(unable, [AttentionSpec(4, 2, 8, torch.float32)], 4, "cpu")
    args = (256, np.array([2] * 8), *LLAMA_8B, False, False, False, 132)
    assert builder.use_cascade_attention(*args) is False
