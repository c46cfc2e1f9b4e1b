"""Nine families, compiled: 50 random batches each give what Transformers' own `generate` gives."""

import random

import pytest
import torch

import fx_passes
from attn_ops.integrations.transformers import register
from graphs import DecodeSession
from graphs.app.parity import Reference, compare, keeping_logits
from tests.kit.marks import long, slow

FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "phi3", "gpt_oss", "gemma3", "llama4", "cohere2"]
NUM_BATCHES = 50
_SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
FURTHER = {
    # Three layers in chunks of one block, one without RoPE whose temperature is tuned. No experts:
    # Transformers' code of them guards on more than one token, so a step of one compiles again.
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "intermediate_size": 96,
            "intermediate_size_mlp": 96,
            "num_hidden_layers": 4,
            "attention_chunk_size": 16,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "num_local_experts": 4,
            "moe_layers": [],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "cohere2": (
        "Cohere2Config",
        {
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 1.0,
        },
    ),
}
"""Families besides those of `make_model`: config class and sizes."""


@pytest.fixture(scope="module")
def make_family(make_model):
    """A model of a family, with weights so large that its attention matters."""

    def build(family: str, **overrides):
        if family not in FURTHER:
            return make_model(family, **overrides)
        transformers = pytest.importorskip("transformers")
        register()
        config_name, own = FURTHER[family]
        config = getattr(transformers, config_name)(**{**_SIZES, **own, **overrides})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="attn_ops"
        ).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.2)
        model.generation_config.eos_token_id = None
        return model.requires_grad_(False)

    return build


REST = [family for family in FAMILIES if family not in ("gemma3", "gpt_oss")]


def random_batch(numbers: random.Random) -> tuple[list[list[int]], int]:
    """1 to 6 prompts of 1 to 40 tokens, and how many tokens to generate for each."""
    lengths = [numbers.randint(1, 40) for _ in range(numbers.randint(1, 6))]
    return [[numbers.randrange(64) for _ in range(n)] for n in lengths], numbers.randint(1, 7)


@pytest.mark.parametrize("family", [*slow("gpt_oss"), *long("gemma3", *REST)])
def test_50_random_batches_equal_transformers(make_family, family):
    check_random_batches(make_family, family, NUM_BATCHES)


@pytest.mark.parametrize("family", ["llama", *slow("gemma2")])
def test_random_batches_equal_transformers(make_family, family):
    check_random_batches(make_family, family, 12)


def check_random_batches(make_family, family: str, num_batches: int) -> None:
    model = make_family(family, tie_word_embeddings=False)  # tied, Gemma 2 repeats its last token
    reference = Reference(model)
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = DecodeSession(compiled, max_batch_size=4, max_tokens=48, max_tokens_per_step=16)
    for cache in session.cache.tensors:
        cache[1:] = float("nan")  # only tokens that were written may be read
    numbers, outputs = random.Random(family), []
    for _ in range(num_batches):
        prompts, max_new_tokens = random_batch(numbers)
        with keeping_logits(session) as logits:
            results = session.generate(prompts, max_new_tokens)
        parity = compare(reference, prompts, results, [r for _, r in sorted(logits.items())])
        assert parity.num_identical == len(prompts)
        assert parity.max_logits_difference < 1e-4
        assert all(len(rows) == max_new_tokens for rows in logits.values())
        assert [r.finish_reason for r in results] == ["length"] * len(prompts)
        outputs += [r.token_ids for r in results]
    counters = session.counters
    graphs = (counters.num_graphs, counters.num_breaks, counters.num_recompiles)
    assert graphs == (1, 0, 0)
    assert session.cache.num_free_blocks == session.cache.num_usable_tokens // 16
    assert_outputs_vary(outputs)


def assert_outputs_vary(outputs: list[list[int]]) -> None:
    """A model that repeats one token agrees with any other that does."""
    assert len({token for tokens in outputs for token in tokens}) > 32
    longer = [tokens for tokens in outputs if len(tokens) >= 4]
    assert sum(len(set(tokens)) > 1 for tokens in longer) > 0.8 * len(longer)


def test_windows_and_soft_caps_matter(make_family):
    """Prompts are long enough for what sets the families apart: without it the logits differ."""
    prompt = list(range(30))
    changes = {
        "mistral": {"sliding_window": None},
        "phi3": {"sliding_window": None},
        "gemma2": {"attn_logit_softcapping": None},
        "llama4": {"attention_chunk_size": 64},
        "cohere2": {"sliding_window": 64},
    }
    for family, change in changes.items():
        _, logits = Reference(make_family(family)).generate(prompt, 1)
        _, others = Reference(make_family(family, **change)).generate(prompt, 1)
        assert (logits - others).abs().max() > 1e-2, family


def test_temperature_tuning_matters(make_family):
    """Llama 4 scales queries by their position; of a packed batch, each row has its own."""
    prompt = list(range(30))
    _, logits = Reference(make_family("llama4")).generate(prompt, 1)
    _, others = Reference(make_family("llama4", attn_temperature_tuning=False)).generate(prompt, 1)
    assert (logits - others).abs().max() > 1e-2


@pytest.mark.parametrize(("backend", "used"), [("TORCH", "FULL"), *slow(("FLEX", "PIECEWISE"))])
def test_chunked_layers_on_the_path_of_captures(make_family, backend, used):
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
