"""The example of a plain nn.Module: its tokens are those of a model that keeps no cache."""

import inspect

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from examples import own_model

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8]]


def without_cache(prompt: list[int], num_tokens: int, device: str) -> list[int]:
    """Each token from a forward of all tokens before it."""
    torch.manual_seed(0)
    model, tokens = own_model.Model().to(device), list(prompt)
    for _ in range(num_tokens):
        ids = torch.tensor(tokens, device=device)
        x = model.tokens(ids) + model.positions(torch.arange(len(tokens), device=device))
        for layer in model.layers:
            qkv = layer.qkv(layer.norm(x)).view(len(tokens), -1, own_model.H).transpose(0, 1)
            q, k, v = qkv.split([own_model.N, own_model.K, own_model.K])
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + layer.out(attended.transpose(0, 1).flatten(1))
        tokens.append(int(model.head(x[-1]).argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_own_model(compiled, device):
    torch._dynamo.reset()
    counters.clear()
    found = own_model.generate(PROMPTS, 20, device, compiled)  # over a block's border
    assert found == [without_cache(prompt, 20, device) for prompt in PROMPTS]
    assert len({token for tokens in found for token in tokens}) > 10
    assert counters["stats"]["unique_graphs"] == int(compiled)
    assert not counters["graph_break"]


def test_it_needs_nothing_of_integrations():
    assert "integrations" not in inspect.getsource(own_model)
