"""TRL's trainers on sessions of the model that they train."""

import copy

import pytest
import torch

from graphs.integrations.generate_batch import enable
from tests.kit.models import build_model
from tests.kit.text import small_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from graphs.integrations import trl as door  # noqa: E402  it imports trl

LETTERS = range(40, 140)  # tokens that are rewarded


@pytest.fixture(scope="module")
def tokenizer():
    found = copy.copy(small_tokenizer())
    found.pad_token = found.eos_token
    return found


@pytest.fixture
def model(tokenizer):
    size = len(tokenizer)
    model = build_model("llama", vocab_size=size, eos_token_id=0, pad_token_id=0, bos_token_id=None)
    model.set_attn_implementation("sdpa")
    return model.requires_grad_(True).train()


def reward(completion_ids, **_):
    return [sum(token in LETTERS for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(model, tokenizer, folder, prompts, **options):
    names = {"rollout_func", "peft_config"} & options.keys()
    own = {name: options.pop(name) for name in names}
    args = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=16, num_generations=8,
        max_completion_length=12, learning_rate=1e-2, beta=0.0, bf16=False, use_cpu=True,
        report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
        **options,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=model, reward_funcs=reward, args=args, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}), **own,
    )  # fmt: skip


def rewards(trainer) -> list[float]:
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


TEXTS = ["one two", "The quick", "three"] * 40
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]


@pytest.fixture
def recorded(monkeypatch):
    """What the rollout function returned, and the weights' own log-probabilities of it."""
    calls = []
    roll_out = door._roll_out

    def record(trained, ids, config):
        found = roll_out(trained, ids, config)
        calls.append((found, logprobs_of(trained.original, found, config.temperature)))
        return found

    monkeypatch.setattr(door, "_roll_out", record)
    return calls


@torch.no_grad()
def logprobs_of(model, found, temperature) -> list[list[float]]:
    """By the model as it is trained."""
    wanted = []
    for prompt, completion in zip(found["prompt_ids"], found["completion_ids"], strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        rows = (logits / temperature).log_softmax(-1)
        wanted.append(rows.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist())
    return wanted


def test_reward_rises_by_rollout_func(model, tokenizer, tmp_path, recorded):
    trainer = trainer_of(
        model, tokenizer, tmp_path, CHATS, max_steps=30, temperature=0.9,
        rollout_func=door.rollout_func(), gradient_checkpointing=True,
    )  # fmt: skip
    found = rewards(trainer)
    assert sum(found[-5:]) / 5 > sum(found[:5]) / 5 + 0.2
    for rollout, wanted in recorded:
        for ours, theirs in zip(rollout["logprobs"], wanted, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        chats = tokenizer.apply_chat_template(CHATS[:3], add_generation_prompt=True)["input_ids"]
        assert all(prompt in chats for prompt in rollout["prompt_ids"])
    for rollout, _ in recorded[:5]:  # before it has learned one answer
        groups = [rollout["completion_ids"][i : i + 8] for i in range(0, 16, 8)]
        assert all(len(set(map(tuple, group))) > 4 for group in groups)
    assert model.config._attn_implementation == "sdpa"


def test_reward_rises_by_generate_batch(model, tokenizer, tmp_path):
    enable(model)
    trainer = trainer_of(
        model, tokenizer, tmp_path, TEXTS, max_steps=30, use_transformers_continuous_batching=True
    )
    found = rewards(trainer)
    assert sum(found[-5:]) / 5 > sum(found[:5]) / 5 + 0.2
    assert model.generate_batch.methods.trained._session is not None


def test_adapters_are_trained(model, tokenizer, tmp_path, recorded):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], r=8)
    trainer = trainer_of(
        model, tokenizer, tmp_path, TEXTS, max_steps=4, peft_config=config,
        rollout_func=door.rollout_func(),
    )  # fmt: skip
    rewards(trainer)
    for rollout, wanted in recorded:
        for ours, theirs in zip(rollout["logprobs"], wanted, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


def test_what_it_refuses(model, tokenizer, tmp_path):
    trainer = trainer_of(model, tokenizer, tmp_path, TEXTS, max_steps=1)
    trainer.use_vllm = True
    with pytest.raises(ValueError, match="use_vllm must be False"):
        door.rollout_func()(TEXTS[:2], trainer)
    trainer.use_vllm, trainer.tools = False, [len]
    with pytest.raises(ValueError, match="trainer must have no tools and environments"):
        door.rollout_func()(TEXTS[:2], trainer)
    trainer.tools, trainer.is_fsdp_enabled = [], True
    with pytest.raises(ValueError, match="trainer must hold whole weights"):
        door.rollout_func()(TEXTS[:2], trainer)


def test_other_trainers_are_untouched(model, tokenizer, tmp_path):
    """An enabled model that has generated trains to the same weights."""
    weights = []
    for enabled in (False, True):
        own = copy.deepcopy(model)
        if enabled:
            enable(own)
            own.generate_batch([[5, 6]], max_new_tokens=4)
        torch.manual_seed(0)
        rows = datasets.Dataset.from_dict({"text": TEXTS[:9]})
        args = trl.SFTConfig(
            str(tmp_path), max_steps=3, bf16=False, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True, per_device_train_batch_size=2, max_length=32,
        )  # fmt: skip
        trl.SFTTrainer(own, args, train_dataset=rows, processing_class=tokenizer).train()
        weights.append([weight.detach().clone() for weight in own.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert not torch.equal(weights[0][0], next(model.parameters()))
