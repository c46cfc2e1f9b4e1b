"""A trained model: what it says makes sense, and is what Transformers' `generate` says."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from graphs import DecodeSession
from graphs.app.chat import Chat
from graphs.app.presets import load
from graphs.app.prompts import tokenizer_of
from graphs.requests.tokens import Tokens
from tests.kit.marks import REAL_MODEL
from tests.kit.models import generated

pytestmark = REAL_MODEL

QUESTIONS = (
    "What is the capital of France?",
    "How many days are in a week?",
    "Name three fruits.",
    "Write one sentence about the sea.",
)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(smollm2):
    return load(smollm2)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return tokenizer_of(smollm2)


def test_four_chats_at_once_equal_generate(model, tokenizer):
    assert model.dtype == torch.float32
    prompts = [Tokens(tokenizer).chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    session = DecodeSession(
        model, max_batch_size=3, max_tokens=128, max_tokens_per_step=20, cudagraph_mode="NONE"
    )
    results = session.generate(prompts, NUM_TOKENS)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == generated(model, prompt, NUM_TOKENS, do_sample=False)
        ends = result.token_ids[-1] == tokenizer.eos_token_id
        assert (result.finish_reason == "eos") == ends
        assert tokenizer.eos_token_id not in result.token_ids[:-1]
    assert "Paris" in tokenizer.decode(results[0].token_ids)
    assert {r.finish_reason for r in results} == {"eos", "length"}


def test_a_conversation_equals_generate(smollm2, model, tokenizer):
    talk, messages = Chat(smollm2, max_new_tokens=NUM_TOKENS), []
    answers = []
    for question in ("What is the capital of France?", "And of Italy?", "What do bees make?"):
        answers.append("".join(talk.ask(question)))
        messages.append({"role": "user", "content": question})
        tokens = generated(model, Tokens(tokenizer).chat(messages), NUM_TOKENS, do_sample=False)
        assert answers[-1] == tokenizer.decode(tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert "Paris" in answers[0]
    assert "Rome" in answers[1]


@pytest.fixture(scope="module")
def session(model, tokenizer):
    return DecodeSession(
        model, max_batch_size=4, max_tokens=512, tokenizer=tokenizer, share_prefixes=True,
        cudagraph_mode="NONE", num_draft_tokens=3,
    )  # fmt: skip


LICENCE = (Path(__file__).parents[2] / "LICENSE").read_text()[:1500]


def test_perplexity_of_a_licence_is_that_of_transformers(session, model, tokenizer):
    (score,) = session.score([LICENCE], logprobs=1)
    model.set_attn_implementation("eager")
    try:
        ids = tokenizer(LICENCE, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            wanted = model(ids, labels=ids).loss
    finally:
        model.set_attn_implementation("attn_ops")
    mean = -score.total / len(score.logprobs)
    assert mean == pytest.approx(wanted.item(), abs=1e-4)
    assert 0.3 < sum(score.is_argmax) / len(score.is_argmax) < 1, "it knows such texts"


def test_json_is_sensible(session):
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}, "is_in_europe": {"type": "boolean"}},
        "required": ["capital", "is_in_europe"],
    }
    messages = [{"role": "user", "content": "Name the capital of France, in JSON."}]
    found = json.loads(session.chat(messages, 64, structured_outputs={"json": schema}).text)
    assert "Paris" in found["capital"]


@pytest.mark.long
def test_bfloat16_rounds_no_worse_than_transformers(model, tokenizer):
    """Mean error of log-probabilities of real text, beside float32."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))[:5]
    texts = [tokenizer(page.read_text())["input_ids"][:300] for page in pages]
    rough = copy.deepcopy(model).bfloat16()
    session = DecodeSession(rough, max_batch_size=4, max_tokens=320, cudagraph_mode="NONE")
    ours = [torch.tensor(score.logprobs) for score in session.score(texts)]
    errors = []
    for one in (model, rough):
        one.set_attn_implementation("sdpa")
    try:
        for text, found in zip(texts, ours, strict=True):
            ids = torch.tensor([text])
            with torch.no_grad():
                rows = [m(ids).logits[0, :-1].float().log_softmax(-1) for m in (model, rough)]
            right, theirs = (row.gather(1, ids[0, 1:, None])[:, 0] for row in rows)
            errors.append(torch.stack([(found - right).abs(), (theirs - right).abs()]))
    finally:
        model.set_attn_implementation("attn_ops")
    mean_ours, mean_theirs = torch.cat(errors, dim=1).mean(dim=1).tolist()
    assert mean_ours < 1.05 * mean_theirs


def test_answers_are_scored_as_one_would(session):
    question = "Question: What is the capital of France?\nAnswer:"
    answers = [" Paris", " Banana", " Berlin", " Monday"]
    scores = session.score([question] * 4, answers)
    totals = [score.total for score in scores]
    assert totals.index(max(totals)) == 0


def test_streams_stop_where_the_text_says(session, tokenizer):
    messages = [{"role": "user", "content": "Name three fruits."}]
    prompt = Tokens(tokenizer).chat(messages)
    whole = session.chat(messages, NUM_TOKENS)
    assert whole.text == "".join(output.text for output in session.stream(prompt, NUM_TOKENS))
    (cut,) = session.generate([prompt], NUM_TOKENS, stop="2.")
    assert cut.text == whole.text.partition("2.")[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "2.")


def test_drafts_from_the_prompt_are_accepted(session, tokenizer):
    """Text that repeats: tokens after the same two are proposed."""
    text = "The sea is blue. The sky is blue. The sea is blue. The sky is"
    (alone,) = session.generate([text], 20)
    request, accepted, steps = session.add(text, 20), 0, 0
    known = tokenizer(text)["input_ids"]
    while session.num_unfinished:
        tail, draft = known[-2:], []
        for at in range(len(known) - 3, -1, -1):
            if known[at : at + 2] == tail:
                draft = known[at + 2 : at + 5]
                break
        outputs = session.verify_draft({request: draft})
        known += [output.token_id for output in outputs]
        accepted, steps = accepted + len(outputs), steps + 1
    assert session.result(request).token_ids == alone.token_ids
    session.discard(request)
    assert accepted / steps > 1.2


def test_an_fp8_cache_costs_little(model, tokenizer):
    session = DecodeSession(
        model, max_batch_size=1, max_tokens=512, tokenizer=tokenizer, cudagraph_mode="NONE",
        kv_cache_dtype="fp8_e4m3",
    )  # fmt: skip
    exact = DecodeSession(
        model, max_batch_size=1, max_tokens=512, tokenizer=tokenizer, cudagraph_mode="NONE"
    )
    (rough,), (right,) = session.score([LICENCE]), exact.score([LICENCE])
    difference = (right.total - rough.total) / len(right.logprobs)
    assert abs(difference) < 0.05


# -- doors; lm-eval and the server have theirs -----------------------------------------------------


def test_generate_batch_answers_as_generate_does(model, tokenizer):
    from graphs.integrations.generate_batch import disable, enable

    prompts = [Tokens(tokenizer).chat([{"role": "user", "content": q}]) for q in QUESTIONS[:3]]
    config = GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    wanted = [generated(model, prompt, NUM_TOKENS, do_sample=False) for prompt in prompts]
    model.set_attn_implementation("sdpa")
    enable(model)
    found = model.generate_batch(prompts, generation_config=config)
    disable(model)
    model.set_attn_implementation("attn_ops")
    assert [found[f"req_{i}"].generated_tokens for i in range(3)] == wanted
    assert "Paris" in tokenizer.decode(found["req_0"].generated_tokens)


@pytest.mark.long
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

    chats = [[{"role": "user", "content": "Name any city."}]] * 8
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_steps=2,
        max_completion_length=8, learning_rate=2e-5, beta=0.0, bf16=False, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=trained, reward_funcs=reward, args=args, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"prompt": chats}),
        rollout_func=rollout_func(max_tokens=128),
    )  # fmt: skip
    trainer.train()
    assert len(said) == 8
    assert len(set(said)) > 3
    pairs = zip(model.parameters(), trained.parameters(), strict=True)
    assert any(not torch.equal(before, after) for before, after in pairs)
