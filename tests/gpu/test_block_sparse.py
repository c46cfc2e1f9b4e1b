"""Captured sessions of a model in which dense and block-sparse layers alternate."""

import pytest
import torch
from transformers import LlamaConfig

import fx_passes
from attn_ops.integrations import transformers as integration
from examples.phi3_small import MODEL
from graphs import DecodeSession
from graphs.app.parity import Reference, compare

pytestmark = pytest.mark.gpu

VOCAB = 512
SIZES = {"max_batch_size": 8, "max_tokens": 512, "max_tokens_per_step": 256}


@pytest.fixture(scope="module")
def model():
    """Heads of 64, blocks of 32 tokens: pages of 16 are smaller."""
    integration.register()
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=VOCAB, max_position_embeddings=1024,
        blocksparse_block_size=32, blocksparse_num_local_blocks=2, blocksparse_vert_stride=4,
        blocksparse_homo_head_pattern=False, dense_attention_every_n_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = MODEL._from_config(config, attn_implementation="attn_ops", dtype=torch.bfloat16)
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.08)
    made.generation_config.eos_token_id = None
    return made.eval().requires_grad_(False)


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)


def prompts_of(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 450, (12,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_500_random_steps_verified(model, kv_cache_dtype):
    """Prompts in chunks, requests that come and go; every replay is compared with a call."""
    session = DecodeSession(
        compiled(model), verify="always", kv_cache_dtype=kv_cache_dtype, **SIZES
    )
    assert session.backend_selection.backend.name == "BLOCKSPARSE"
    seed = 0
    while session.num_steps["captured"] < 500:
        session.generate(prompts_of(seed), max_new_tokens=30)
        seed += 1
    assert session.report().num_recompiles == 0


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_modes(model, mode):
    """Also batches with prompts in a graph: the backend's level is ALWAYS."""
    session = DecodeSession(compiled(model), cudagraph_mode=mode, verify="always", **SIZES)
    session.generate(prompts_of(1), max_new_tokens=20)
    assert session.num_steps["captured"] > 0


def test_tokens_are_those_of_transformers(model):
    session = DecodeSession(compiled(model), **SIZES)
    prompts = prompts_of(2)
    results = session.generate(prompts, max_new_tokens=16)
    parity = compare(Reference(model), prompts, results, [[] for _ in prompts])
    assert parity.ok
    assert parity.num_distinct_tokens > 24
