"""Seven families, compiled: 50 random batches each give what Transformers' own `generate` gives."""

import random

import pytest
import torch

import fx_passes
from graphs.parity import LogitsSession, Reference, compare

FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "phi3", "gpt_oss", "gemma3"]
NUM_BATCHES = 50


def random_batch(numbers: random.Random) -> tuple[list[list[int]], int]:
    """1 to 6 prompts of 1 to 40 tokens, and how many tokens to generate for each."""
    lengths = [numbers.randint(1, 40) for _ in range(numbers.randint(1, 6))]
    return [[numbers.randrange(64) for _ in range(n)] for n in lengths], numbers.randint(1, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_50_random_batches_equal_transformers(make_model, family):
    model = make_model(family, tie_word_embeddings=False)  # tied, Gemma 2 repeats its last token
    reference = Reference(model)
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = LogitsSession(compiled, max_batch_size=4, max_tokens=48, max_tokens_per_step=16)
    for cache in session.cache.tensors:
        cache[1:] = float("nan")  # only tokens that were written may be read
    numbers, outputs = random.Random(family), []
    for _ in range(NUM_BATCHES):
        prompts, max_new_tokens = random_batch(numbers)
        session.logits.clear()
        results = session.generate(prompts, max_new_tokens)
        parity = compare(
            reference, prompts, results, [r for _, r in sorted(session.logits.items())]
        )
        assert parity.num_identical == len(prompts)
        assert parity.max_logits_difference < 1e-4
        assert all(len(rows) == max_new_tokens for rows in session.logits.values())
        assert [r.finish_reason for r in results] == ["length"] * len(prompts)
        outputs += [r.token_ids for r in results]
    counters = session.counters
    assert (counters.num_graphs, counters.num_breaks, counters.num_recompiles) == (1, 0, 0)
    assert session.cache.num_free_blocks == session.cache.num_usable_tokens // 16
    assert_outputs_vary(outputs)


def assert_outputs_vary(outputs: list[list[int]]) -> None:
    """A model that repeats one token agrees with any other that does."""
    assert len({token for tokens in outputs for token in tokens}) > 32
    longer = [tokens for tokens in outputs if len(tokens) >= 4]
    assert sum(len(set(tokens)) > 1 for tokens in longer) > 0.8 * len(longer)


def test_windows_and_soft_caps_matter(make_model):
    """Prompts are long enough for what sets the families apart: without it the logits differ."""
    prompt = list(range(30))
    changes = {
        "mistral": {"sliding_window": None},
        "phi3": {"sliding_window": None},
        "gemma2": {"attn_logit_softcapping": None},
    }
    for family, change in changes.items():
        _, logits = Reference(make_model(family)).generate(prompt, 1)
        _, others = Reference(make_model(family, **change)).generate(prompt, 1)
        assert (logits - others).abs().max() > 1e-2, family
