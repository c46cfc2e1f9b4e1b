"""A trained model behind the doors `generate_batch` and TRL; lm-eval and the server have theirs."""

import copy

import pytest
import torch
from transformers import GenerationConfig

from graphs.app.presets import load
from graphs.app.prompts import tokenizer_of
from graphs.requests.tokens import Tokens
from tests.kit.marks import REAL_MODEL

pytestmark = REAL_MODEL

QUESTIONS = ("What is the capital of France?", "How many days are in a week?", "Name a colour.")


@pytest.fixture(scope="module")
def model(smollm2):
    return load(smollm2)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return tokenizer_of(smollm2)


def test_generate_batch_answers_as_generate_does(model, tokenizer):
    from graphs.integrations.generate_batch import disable, enable

    prompts = [Tokens(tokenizer).chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    config = GenerationConfig(
        max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = [
            model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
            for prompt in prompts
        ]
    enable(model)
    found = model.generate_batch(prompts, generation_config=config)
    disable(model)
    assert [found[f"req_{i}"].generated_tokens for i in range(3)] == [w.tolist() for w in wanted]
    assert "Paris" in tokenizer.decode(found["req_0"].generated_tokens)


def test_it_draws_its_own_answers_while_it_is_trained(model, tokenizer, tmp_path):
    """A few steps of GRPO by `rollout_func`."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from graphs.integrations.trl import rollout_func

    trained = copy.deepcopy(model).requires_grad_(True).train()
    trained.set_attn_implementation("sdpa")
    said = []

    def reward(completions, **_):
        said.extend(completion[0]["content"] for completion in completions)
        return [float(len(completion[0]["content"])) for completion in completions]

    chats = [[{"role": "user", "content": "Name any city."}]] * 16
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=8, max_steps=2,
        max_completion_length=8, learning_rate=2e-5, beta=0.0, bf16=False, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=trained, reward_funcs=reward, args=args, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"prompt": chats}),
        rollout_func=rollout_func(max_tokens=128),
    )  # fmt: skip
    trainer.train()
    assert len(said) == 16
    assert len(set(said)) > 4
    pairs = zip(model.parameters(), trained.parameters(), strict=True)
    assert any(not torch.equal(before, after) for before, after in pairs)
