"""Near ties of a router: no reason to refuse a model, and no cover for rows that meet."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

from attn_ops.integrations import transformers as integration
from graphs import DecodeSession

EXPERTS = 8


def mixtral(layers: int = 12) -> torch.nn.Module:
    integration.register()
    config = AutoConfig.for_model(
        "mixtral", hidden_size=64, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, num_hidden_layers=layers,
        num_local_experts=EXPERTS, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="attn_ops"
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.05)
    return model.eval().requires_grad_(False)


def session(model) -> DecodeSession:
    return DecodeSession(model, max_batch_size=2, max_tokens=32, backend="TORCH")


def with_scores(monkeypatch, change) -> None:
    """Change what routers score."""
    linear = torch.nn.functional.linear

    def changed(x, weight, bias=None):
        y = linear(x, weight, bias)
        return change(y) if weight.shape[0] == EXPERTS else y

    monkeypatch.setattr(torch.nn.functional, "linear", changed)


@pytest.mark.parametrize("seed", range(3))
def test_scores_that_round_by_the_number_of_rows(monkeypatch, seed):
    """By a percent of the largest, as if each number of rows had another kernel."""
    torch.manual_seed(seed)
    model = mixtral()

    def rounded(y):
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(y.shape[0]))
        return y + 0.01 * y.abs().max() * noise.to(y.dtype)

    with_scores(monkeypatch, rounded)
    session(model)


def test_routers_that_see_other_rows_are_refused(monkeypatch):
    model = mixtral(layers=2)
    with_scores(monkeypatch, lambda y: y - y.mean(0, keepdim=True))
    with pytest.raises(ValueError, match="rows of a batch must meet in attention only"):
        session(model)


class Wide(torch.nn.Module):
    """A head whose logits are made float32 behind products that round by the number of rows."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x)
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(y.shape[1]))
        return (y + 0.005 * y.abs().max() * noise.to(y.dtype)).float()


def test_wide_logits_of_a_narrow_model_may_be_rounded():
    """As Nemotron-H makes them."""
    model = mixtral(layers=1)
    model.lm_head = Wide(model.lm_head)
    session(model)
    model.float()
    with pytest.raises(ValueError, match="rows of a batch must meet in attention only"):
        session(model)
