"""Prompts of embeddings and of images, beside the same prompts of tokens and `generate`."""

import pytest
import torch
import transformers
from transformers import CLIPVisionConfig, LlamaConfig, MistralConfig, PixtralVisionConfig

from attn_ops.integrations import transformers as integration
from graphs.requests.embeds import Embeds
from tests.kit.models import build_model
from tests.kit.sessions import captured, is_empty, make_session

PROMPTS = [[5, 9, 3], [7] * 20, [1], [11, 12, 13, 14, 15]]


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


def rows_of(model, prompt, dtype=torch.float32):
    return {"inputs_embeds": model.get_input_embeddings()(torch.tensor([prompt])).to(dtype)}


@pytest.mark.parametrize("make", [make_session, captured])
@pytest.mark.parametrize("decode_steps", [1, 8])
def test_tokens_are_those_of_the_same_prompts(model, make, decode_steps):
    options = {"decode_steps": decode_steps, "max_tokens_per_step": 7, "max_batch_size": 3}
    wanted = make(model, **options).generate(PROMPTS, 8)
    session = make(model, **options)
    mixed = [rows_of(model, p) if i % 2 else p for i, p in enumerate(PROMPTS)]
    assert session.generate(mixed, 8) == wanted
    result = session.generate(rows_of(model, PROMPTS[0]), 8, logprobs=0)[0]
    assert result.token_ids == wanted[0].token_ids
    assert result.prompt_token_ids == []
    assert len(result.logprobs) == 8


def test_with_preemption(model):
    rows = [rows_of(model, p) for p in PROMPTS]
    wanted = make_session(model).generate(PROMPTS, 30)
    session = make_session(model, cache_tokens=96, max_tokens=64)
    assert session.generate(rows, 30) == wanted
    assert is_empty(session)


def test_equal_rows_are_shared_and_others_are_not(model):
    session = make_session(model, share_prefixes=True, max_batch_size=1)
    long = list(range(1, 50))
    wanted = make_session(model).generate([long], 8)
    assert session.generate([rows_of(model, long)], 8) == wanted
    before = session.scheduler.prefixes.counts().num_shared_tokens
    assert session.generate([rows_of(model, long)], 8) == wanted
    shared = session.scheduler.prefixes.counts().num_shared_tokens
    assert shared - before >= 32
    other = rows_of(model, long)
    other["inputs_embeds"] = other["inputs_embeds"] * 1.5
    alone = make_session(model).generate([other], 8)
    assert session.generate([other, [0] * 49], 8)[:1] == alone
    assert session.scheduler.prefixes.counts().num_shared_tokens == shared


def test_padding_is_left_out(model):
    rows = torch.full((2, 6, 64), float("nan"))
    mask = torch.zeros(2, 6, dtype=torch.int64)
    for number, prompt in enumerate(PROMPTS[::3]):
        rows[number, : len(prompt)] = rows_of(model, prompt)["inputs_embeds"][0]
        mask[number, : len(prompt)] = 1
    found = make_session(model).generate({"inputs_embeds": rows, "attention_mask": mask}, 8)
    assert found == make_session(model).generate(PROMPTS[::3], 8)


def test_what_is_refused(model):
    session = make_session(model)
    good = rows_of(model, [1, 2])
    for prompt, asked, message in (
        ({"inputs_embeds": torch.zeros(2, 3)}, {}, r"inputs_embeds must be a float tensor \[L, 64"),
        ({"inputs_embeds": torch.zeros(1, 2, 64).int()}, {}, "inputs_embeds must be a float"),
        (good | {"input_ids": [1]}, {}, "prompt must hold inputs_embeds and attention_mask alone"),
        (good | {"attention_mask": [1]}, {}, r"attention_mask must be \[1, 2\], got \[1, 1\]"),
        ({"inputs_embeds": torch.zeros(0, 64)}, {}, "prompt must hold at least one token"),
        (good, {"prompt_logprobs": 0}, "prompt_logprobs must not be given with a prompt of"),
        (good, {"bad_words": [[1]]}, "bad_words must not be given with a prompt of embeddings"),
        (good, {"repetition_penalty": 1.5}, "repetition_penalty must be 1 with a prompt of"),
    ):
        with pytest.raises(ValueError, match=message):
            session.generate([prompt], 4, **asked)
    assert is_empty(session)
    assert session.generate([good], 4) == session.generate([[1, 2]], 4)


def test_rows_have_keys_of_their_own():
    rows = torch.randn(3, 8)
    rows[2] = rows[0]
    keys = Embeds(rows).keys
    assert keys[0] == keys[2] != keys[1]
    assert all(-(2**63) <= key < 0 for key in keys)


# -- images ----------------------------------------------------------------------------------------

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
IMAGE, ROWS = 60, 4


def configs() -> dict[str, object]:
    t, llama = transformers, {"model_type": "llama", **TEXT}
    siglip = {"model_type": "siglip_vision_model", **VISION}
    square = VISION | {"image_size": [28, 28], "patch_size": [14, 14]}
    llava = {"vision_config": CLIPVisionConfig(**VISION), "text_config": LlamaConfig(**TEXT)}
    pixtral = PixtralVisionConfig(**VISION, head_dim=16)
    mistral = {"vision_config": pixtral, "text_config": MistralConfig(**TEXT)}
    qwen = {"vision_config": square, "text_config": {"model_type": "qwen2", **TEXT}}
    gemma = {"vision_config": VISION, "text_config": {**TEXT, "head_dim": 16}}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    tower = {"embed_dim": 32, "depth": 2, "num_heads": 2, "hidden_size": 64, "patch_size": 14}
    qwen_vl = {"vision_config": tower, "text_config": {**TEXT, "rope_parameters": rope}}
    image = {"image_token_id": IMAGE}
    return {
        "Llava": t.LlavaConfig(**llava, **image, image_seq_length=ROWS),
        "Mistral3": t.Mistral3Config(**mistral, **image, spatial_merge_size=1),
        "SmolVLM": t.SmolVLMConfig(
            vision_config=VISION, text_config=llama, **image, scale_factor=1
        ),
        "InternVL": t.InternVLConfig(
            **qwen, **image, image_seq_length=ROWS, downsample_ratio=1.0
        ),
        "AyaVision": t.AyaVisionConfig(
            vision_config=siglip, text_config=llama, **image, downsample_factor=1
        ),
        "Gemma3": t.Gemma3Config(
            **gemma, mm_tokens_per_image=ROWS, image_token_index=IMAGE, boi_token_index=61,
            eoi_token_index=62,
        ),
        "Qwen2VL": t.Qwen2VLConfig(**qwen_vl, **image, vision_start_token_id=61),
    }  # fmt: skip


def build(name):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(configs()[name]).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:  # at Transformers' own scale all prompts get the same token
                weight.normal_(std=0.2)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def inputs_of(name, prompt, seed=0):
    ids = torch.tensor([prompt])
    generator = torch.Generator().manual_seed(seed)
    images = {"pixel_values": torch.randn(1, 3, 28, 28, generator=generator)}
    if name == "Mistral3":
        images["image_sizes"] = torch.tensor([[28, 28]])
    if name == "SmolVLM":
        images["pixel_values"] = images["pixel_values"][None]
    if name == "Gemma3":
        images["token_type_ids"] = (ids == IMAGE).long()
    if name == "Qwen2VL":
        images["pixel_values"] = torch.randn(16, 3 * 2 * 14 * 14)
        images["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        images["mm_token_type_ids"] = (ids == IMAGE).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}


LOOK = [5, 9, *[IMAGE] * ROWS, 3, 7]


def generated(model, inputs):
    model.set_attn_implementation("eager")
    try:
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    finally:
        model.set_attn_implementation("attn_ops")
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", ["Llava", "Mistral3", "SmolVLM", "InternVL", "AyaVision"])
def test_images_equal_generate(name):
    model = build(name)
    one, two = inputs_of(name, LOOK), inputs_of(name, [8, *LOOK, 4], seed=1)
    wanted = [generated(model, inputs) for inputs in (one, two)]
    assert wanted[0] != wanted[1]
    session = make_session(model, max_tokens=64, max_tokens_per_step=5)
    text = [[5, 9, 3], [1]]
    alone = session.generate(text, 8)
    found = session.generate([one, text[0], two, text[1]], 8)
    assert [found[0].token_ids, found[2].token_ids] == wanted
    assert [found[1], found[3]] == alone
    assert session.generate(one, 8)[0].token_ids == wanted[0]
    assert len(set(wanted[0])) > 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma3", "its images see what comes behind them"),
        ("Qwen2VL", "positions of its images are not those of text"),
    ],
)
def test_images_in_a_way_of_their_own_are_refused(name, reason):
    integration.register()
    model = build(name)
    model.set_attn_implementation("attn_ops")
    session = make_session(model, max_tokens=64)
    with pytest.raises(ValueError, match=f"model must take images as rows.*{reason}"):
        session.generate(inputs_of(name, LOOK), 8)
    assert session.generate([[5, 9, 3]], 4)
