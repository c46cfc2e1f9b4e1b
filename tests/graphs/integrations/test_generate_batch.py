"""Transformers' continuous batching on a session, beside Transformers' own."""

import asyncio
import copy
import pickle

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.generation.continuous_batching.requests import RequestStatus

from graphs.integrations.generate_batch import METHODS, disable, enable
from tests.kit.models import build_model

PROMPTS = [[5, 9, 3], [7] * 20, [1], [11, 12]]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
GREEDY_CONFIG = GenerationConfig(**GREEDY)


def small(**changes) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(num_blocks=64, page_size=16, **changes)


@pytest.fixture
def model():
    model = build_model("llama")
    model.set_attn_implementation("sdpa")
    return model.train()


def tokens(outputs) -> dict[str, list[int]]:
    return {name: output.generated_tokens for name, output in outputs.items()}


def said(model, prompts=PROMPTS, **asked) -> dict[str, list[int]]:
    """Tokens of greedy requests."""
    return tokens(model.generate_batch(prompts, generation_config=GREEDY_CONFIG, **asked))


def said_by_transformers(model, prompts) -> dict[str, list[int]]:
    disable(model)
    return said(model, prompts, continuous_batching_config=small())


@pytest.mark.parametrize(
    "changes",
    [{}, {"min_new_tokens": 3, "eos_token_id": [23, 25]}, {"repetition_penalty": 1.3}],
    ids=["greedy", "ends", "penalty"],
)
def test_results_are_those_of_transformers(model, changes):
    config = GenerationConfig(**(GREEDY | changes))
    asked = {"continuous_batching_config": small(return_logprobs=True)}
    own = "repetition_penalty" in changes or "min_new_tokens" in changes
    if own:  # its batching has no processor for them; `generate` does
        wanted = {
            f"req_{i}": model.eval()
            .generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
            .tolist()
            for i, prompt in enumerate(PROMPTS)
        }
    else:
        theirs = model.generate_batch(PROMPTS, generation_config=config, **asked)
        wanted = tokens(theirs)
    model.train()
    enable(model)
    ours = model.generate_batch(PROMPTS, generation_config=config, **asked)
    assert list(ours) == [f"req_{i}" for i in range(len(PROMPTS))]
    assert tokens(ours) == wanted
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    for name, output in ours.items():
        assert output.is_finished()
        assert output.error is None
        assert len(output.logprobs) == len(output.generated_tokens)
        assert output.prompt_ids == PROMPTS[int(name[4:])]
        if not own:
            assert output.logprobs == pytest.approx(theirs[name].logprobs, abs=1e-5)


def test_samples_of_a_prompt_differ_and_follow_the_seed(model):
    config = GenerationConfig(**(GREEDY | {"do_sample": True, "num_return_sequences": 3}))
    enable(model)
    torch.manual_seed(1)
    first = model.generate_batch(PROMPTS[:2], generation_config=config)
    assert list(first) == [
        *("req_0__child#0", "req_0__child#1", "req_0"),
        *("req_1__child#0", "req_1__child#1", "req_1"),
    ]
    assert len({tuple(t) for t in tokens(first).values()}) == 6
    again = copy.deepcopy(model)
    torch.manual_seed(1)
    assert tokens(again.generate_batch(PROMPTS[:2], generation_config=config)) == tokens(first)


def test_filters_are_those_that_the_config_names(model):
    """Without a top_k it draws from all tokens, as Transformers' batching does."""
    enable(model, max_tokens=128)
    config = GenerationConfig(**(GREEDY | {"do_sample": True, "temperature": 50.0, "top_p": 1.0}))
    drawn = model.generate_batch([[1]] * 64, generation_config=config, max_new_tokens=20)
    assert len({t for output in drawn.values() for t in output.generated_tokens}) > 55
    config.top_k = 1
    drawn = model.generate_batch([[1]] * 3, generation_config=config)
    assert len({tuple(output.generated_tokens) for output in drawn.values()}) == 1


def test_weights_are_seen_and_a_changed_model_has_a_new_session(model):
    enable(model)
    before = said(model)
    session = model.generate_batch.methods.trained._session
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    after = said(model)
    assert model.generate_batch.methods.trained._session is session
    assert after != before
    model.to(torch.bfloat16).to(torch.float32)
    again = said(model)
    assert model.generate_batch.methods.trained._session is not session
    assert said_by_transformers(model, PROMPTS) == again


def test_longer_prompts_and_more_of_them(model):
    enable(model)
    said(model, [[1]])
    long = [[7] * 100, *PROMPTS * 3]
    found = said(model, long)
    assert said_by_transformers(model, long) == found


def test_an_error_of_one_request_ends_that_one(model):
    def fails(ids, logits):
        if len(ids[0]) > 23:
            raise ZeroDivisionError("too long")
        return logits

    enable(model)
    found = model.generate_batch(PROMPTS, generation_config=GREEDY_CONFIG, logits_processor=fails)
    assert found["req_1"].status is RequestStatus.FAILED
    assert "too long" in found["req_1"].error
    assert all(found[f"req_{i}"].status is RequestStatus.FINISHED for i in (0, 2, 3))


def test_what_is_refused_or_has_no_use(model):
    enable(model)
    with pytest.warns(UserWarning, match="no use for cpu_offload_space, scheduler_type of the"):
        model.generate_batch(
            PROMPTS[:1],
            generation_config=GREEDY_CONFIG,
            continuous_batching_config=small(cpu_offload_space=1.0, scheduler_type="prefill_first"),
        )
    with pytest.raises(ValueError, match=r"generation_config\.num_beams must be neutral"):
        model.generate_batch(PROMPTS, generation_config=GenerationConfig(num_beams=2, **GREEDY))
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        model.generate_batch([[1], []], generation_config=GREEDY_CONFIG)
    assert model.generate_batch([]) == {}
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="model must be a model of Transformers, got Linear"):
        enable(torch.nn.Linear(2, 2))


def test_a_copied_or_saved_model_is_as_before(model, tmp_path):
    enable(model)
    wanted = said(model)
    other = copy.deepcopy(model)
    assert other.generate_batch.methods is not model.generate_batch.methods
    assert said(other) == wanted
    loaded = pickle.loads(pickle.dumps(model))
    assert said(loaded) == wanted
    model.save_pretrained(tmp_path)
    assert not any(name in model.state_dict() for name in METHODS)


def test_compiled(model):
    compiled = torch.compile(model, backend="attn_ops")
    enable(model)
    wanted = said(model)
    enable(compiled)
    assert said(model) == wanted
    session = model.generate_batch.methods.trained._session
    assert session.counters.num_graphs
    assert session.counters.num_recompiles == 0


def test_adapters(model):
    peft = pytest.importorskip("peft")
    enable(model)
    plain = said(model)
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, weight in lora.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    adapted = said(lora)
    assert adapted != plain
    with lora.disable_adapter():
        assert said(lora) == plain
    lora.merge_adapter()
    assert said(lora) == adapted


def test_other_adapters(model):
    peft = pytest.importorskip("peft")
    config = GREEDY_CONFIG
    saved = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    lora = peft.get_peft_model(copy.deepcopy(model), saved)
    enable(lora)
    wanted = lora.eval().generate(torch.tensor([PROMPTS[0]]), generation_config=config)
    found = tokens(lora.generate_batch(PROMPTS[:1], generation_config=config))
    assert found["req_0"] == wanted[0, 3:].tolist()
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="adapters must act on layers, got 'default', a PromptT"):
        enable(peft.get_peft_model(model, virtual))


# -- the manager -----------------------------------------------------------------------------------


def test_manager(model):
    config = GREEDY_CONFIG
    enable(model)
    wanted = said(model)
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        names = manager.add_requests(PROMPTS)
        assert names == list(wanted)
        found = {}
        for result in manager:
            found[result.request_id] = result
            if len(found) == len(names):
                break
        assert tokens(found) == {name: wanted[name] for name in found}
        name = manager.add_request([5, 9, 3], "mine", max_new_tokens=3, record_timestamps=True)
        result = next(iter(manager.request_id_iter(name)))
        assert result.generated_tokens == wanted["req_0"][:3]
        assert result.timestamps == sorted(result.timestamps)
        assert len(result.timestamps) == 3
        streamed = manager.add_request([5, 9, 3], streaming=True)
        parts = list(manager.request_id_iter(streamed))
        assert [len(part.generated_tokens) for part in parts] == list(range(1, 9))
        assert parts[-1].generated_tokens == wanted["req_0"]
        assert model.config._attn_implementation == "attn_ops"
    assert not manager.is_running()
    assert model.training
    assert manager.get_result(timeout=0.1) is None
    early = manager.add_request([5, 9, 3], max_new_tokens=2)  # it waits for the next start
    manager.start()
    assert next(iter(manager.request_id_iter(early))).generated_tokens == wanted["req_0"][:2]
    manager.stop()


def test_cancelled_and_stopped_requests(model):
    enable(model, max_batch_size=2, max_tokens=128)
    manager = model.init_continuous_batching(GenerationConfig(**(GREEDY | {"eos_token_id": -1})))
    manager.start()
    names = manager.add_requests([[1]] * 8, max_new_tokens=100)
    for name in names[4:]:
        manager.cancel_request(name)
    with pytest.raises(ValueError, match="request_id must be new"):
        manager.add_request([1], names[0], max_new_tokens=100)
    manager.stop()
    results = []
    while (result := manager.get_result(timeout=0)) is not None:
        results.append(result)
    assert sorted(result.request_id for result in results) == names[:4]
    assert all(result.status is RequestStatus.FINISHED for result in results)
    manager.start()
    manager.add_requests([[1]] * 2, max_new_tokens=100)
    manager.stop(hard_stop=True)
    results = [manager.get_result(timeout=0), manager.get_result(timeout=0)]
    assert all("closed" in result.error for result in results)
    no_end = manager.add_request([1], eos_token_id=-1, max_new_tokens=40)
    manager.start()
    manager.stop()
    result = manager.get_result(no_end, timeout=0)
    assert len(result.generated_tokens) == 40


def test_what_fails_leaves_the_model_as_it_was(model):
    enable(model, max_tokens=128)
    manager = model.init_continuous_batching(
        GREEDY_CONFIG, ContinuousBatchingConfig(max_queue_size=-1)
    )
    with pytest.raises(ValueError, match="max_waiting must be a positive int"):
        manager.start()
    assert not manager.is_running()
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    running = model.continuous_batching_context_manager(GREEDY_CONFIG)
    one = pytest.raises(RuntimeError, match="must be used by one call or manager at a time")
    with running, one:
        model.generate_batch([[1]])
    assert model.generate_batch([[1]], GREEDY_CONFIG)


def test_autocast_of_the_caller_stays(model):
    enable(model)
    linear = torch.nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with model.continuous_batching_context_manager(GREEDY_CONFIG) as manager:
            manager.add_request([5, 9, 3])
            assert linear(torch.ones(1, 2)).dtype == torch.bfloat16
        assert linear(torch.ones(1, 2)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_every_config_has_its_attention_back():
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            image_size=28, patch_size=14,
        ),
        text_config=build_model("llama").config, image_token_id=60,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa", "": "sdpa"})
    configs = [model.config, model.config.text_config, model.config.vision_config]
    before = [c._attn_implementation for c in configs]
    enable(model)
    assert model.generate_batch([[1, 2]], GREEDY_CONFIG)["req_0"].error is None
    assert [c._attn_implementation for c in configs] == before


def test_a_seed_repeats(model):
    enable(model)
    config = GenerationConfig(**(GREEDY | {"do_sample": True, "num_return_sequences": 2}))
    asked = {"generation_config": config, "continuous_batching_config": small(seed=7)}
    first = tokens(model.generate_batch(PROMPTS, **asked))
    assert tokens(model.generate_batch(PROMPTS, **asked)) == first
    assert first["req_0"] != first["req_0__child#0"]


def test_samples_of_a_prompt_with_a_seed_of_the_call_differ(model):
    enable(model)
    config = GenerationConfig(**(GREEDY | {"do_sample": True, "num_return_sequences": 2}))
    found = tokens(model.generate_batch(PROMPTS[:1], generation_config=config, seed=5))
    one = GenerationConfig(**(GREEDY | {"do_sample": True}))
    alone = [model.generate_batch(PROMPTS[:1], generation_config=one, seed=i) for i in (5, 6)]
    assert list(found.values()) == [tokens(each)["req_0"] for each in alone]


def test_a_config_without_eos_has_the_models_own(model):
    """As in `generate`: that of its generation config before that of its config."""
    enable(model)
    plain = {name: value for name, value in GREEDY.items() if name != "eos_token_id"}
    end = tokens(model.generate_batch(PROMPTS[:1], GenerationConfig(**GREEDY)))["req_0"][3]
    model.config.eos_token_id, model.generation_config.eos_token_id = 2, [2, end]
    found = tokens(model.generate_batch(PROMPTS[:1], GenerationConfig(**plain)))["req_0"]
    assert found[-1] == end
    assert len(found) <= 4


def test_options_are_checked_at_once(model):
    with pytest.raises(TypeError, match="got 'max_toknes', which may mean 'max_tokens'"):
        enable(model, max_toknes=3)
    with pytest.raises(ValueError, match="compile must be True or False, got 'yes'"):
        enable(model, compile="yes")
    enable(model, max_tokens=32)
    long = [[1]], GenerationConfig(**(GREEDY | {"max_new_tokens": 100, "eos_token_id": -1}))
    model.generate_batch(*long)
    session = model.generate_batch.methods.trained._session
    assert len(tokens(model.generate_batch(*long))["req_0"]) < 40
    assert model.generate_batch.methods.trained._session is session


def test_result_handlers(model):
    enable(model)
    config = GREEDY_CONFIG
    wanted = said(model)

    async def collect():
        with model.continuous_batching_context_manager(generation_config=config) as manager:
            found, ended = {}, asyncio.Event()

            def take(result):
                found[result.request_id] = result.generated_tokens
                if len(found) == len(PROMPTS):
                    ended.set()

            for number, prompt in enumerate(PROMPTS):
                manager.register_result_handler(f"req_{number}", take)
                manager.add_request(prompt)
            await asyncio.wait_for(ended.wait(), 60)
        return found

    assert asyncio.run(collect()) == wanted
