"""Nine families, compiled: random batches give what Transformers' own `generate` gives."""

import random

import pytest
import torch

import fx_passes
from graphs import DecodeSession
from graphs.app.parity import Reference, compare, keeping_logits
from tests.kit.marks import long, slow
from tests.kit.models import build_model
from tests.kit.sessions import chunked, is_empty, poisoned, tokens_of

FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "phi3", "gpt_oss", "gemma3", "llama4", "cohere2"]
LLAMA4 = {
    "num_layers": 4,
    "floor_scale": 4,
    "attn_scale": 0.5,
    "moe_layers": [],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
"""Three layers in chunks of one block, one without RoPE whose temperature is tuned. No experts:
Transformers' code of them guards on more than one token, so a step of one compiles again.
"""


def make_family(family: str, **overrides):
    return build_model(family, **((LLAMA4 if family == "llama4" else {}) | overrides))


def random_batch(numbers: random.Random) -> tuple[list[list[int]], int]:
    """1 to 6 prompts of 1 to 40 tokens, and how many tokens to generate for each."""
    lengths = [numbers.randint(1, 40) for _ in range(numbers.randint(1, 6))]
    return [[numbers.randrange(64) for _ in range(n)] for n in lengths], numbers.randint(1, 7)


@pytest.mark.parametrize(
    ("family", "number"),
    [
        ("llama", 12),
        *slow(("gemma2", 12), ("gpt_oss", 12)),
        *long(*((family, 50) for family in FAMILIES)),
    ],
)
def test_random_batches_equal_transformers(family, number):
    model = make_family(family, tie_word_embeddings=False)  # tied, Gemma 2 repeats its last token
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session, outputs = check_random_batches(model, compiled, number, family, block_size=16)
    assert session.counters.num_graphs == 1
    assert_outputs_vary(outputs)


def check_random_batches(model, run, number: int, seed: str, recompiles: int = 0, **options):
    """Chunked, over poisoned caches: tokens and logits are the reference's; nothing compiles anew.

    The session, and its tokens. Logits of replayed steps are not kept.
    """
    called = "debug" not in options
    session = poisoned(chunked(run, max_tokens=48, **options))
    reference, numbers, outputs = Reference(model), random.Random(seed), []
    for _ in range(number):
        prompts, max_new_tokens = random_batch(numbers)
        with keeping_logits(session) as logits:
            results = session.generate(prompts, max_new_tokens)
        kept = [rows for _, rows in sorted(logits.items())] if called else [[] for _ in prompts]
        parity = compare(reference, prompts, results, kept)
        assert parity.num_identical == len(prompts)
        assert parity.max_logits_difference < 1e-4
        assert all(len(rows) == max_new_tokens for rows in logits.values() if called)
        assert [r.finish_reason for r in results] == ["length"] * len(prompts)
        outputs += tokens_of(results)
    counters = session.counters
    assert counters.num_breaks == 0
    assert counters.num_recompiles <= recompiles
    assert is_empty(session)
    return session, outputs


def assert_outputs_vary(outputs: list[list[int]]) -> None:
    """A model that repeats one token agrees with any other that does."""
    assert len({token for tokens in outputs for token in tokens}) > 32
    longer = [tokens for tokens in outputs if len(tokens) >= 4]
    assert sum(len(set(tokens)) > 1 for tokens in longer) > 0.8 * len(longer)


def test_what_sets_families_apart_matters():
    """Prompts are long enough for it: without it the logits differ."""
    prompt = list(range(30))
    changes = [
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("llama4", {"attention_chunk_size": 64}),
        ("llama4", {"attn_temperature_tuning": False}),  # of a packed batch, each row has its own
        ("cohere2", {"sliding_window": 64}),
    ]
    for family, change in changes:
        _, logits = Reference(make_family(family)).generate(prompt, 1)
        _, others = Reference(make_family(family, **change)).generate(prompt, 1)
        assert (logits - others).abs().max() > 1e-2, family


@pytest.mark.parametrize(("backend", "used"), [("TORCH", "FULL"), *slow(("FLEX", "PIECEWISE"))])
def test_chunked_layers_on_the_path_of_captures(backend, used):
    """Lengths are on the device only; requests cross the ends of several chunks.

    FLEX needs lengths on the host, so attention runs between graphs.
    """
    model, prompts = make_family("llama4"), [[3], list(range(30)), [5] * 15]
    sizes = {"max_batch_size": 4, "max_tokens": 64, "backend": backend, "cudagraph_mode": "FULL"}
    session = DecodeSession(model, debug="eager_replay", **sizes)
    assert session.graph_mode.name == used
    wanted = DecodeSession(model, **(sizes | {"cudagraph_mode": "NONE"})).generate(prompts, 20)
    assert session.generate(prompts, 20) == wanted
    assert session.num_steps["called"] == 0
