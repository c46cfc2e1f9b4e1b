"""Prompts as tokenizers give them: padding is no text, and tokens of images are refused."""

import pytest
import torch

from graphs.requests.embeds import media_tokens
from tests.fuzz.configs import padded
from tests.kit.models import build_model
from tests.kit.sessions import PROMPTS, make_session


@pytest.fixture
def session():
    return make_session(build_model())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [0, 2])  # 2 is text, too
def test_padding_of_a_mask_is_no_text(session, side, pad):
    transformers = pytest.importorskip("transformers")
    wanted = session.generate(PROMPTS, 6, repetition_penalty=1.5)
    batch = padded(PROMPTS, pad, side)
    assert session.generate(batch, 6, repetition_penalty=1.5) == wanted
    encoded = transformers.BatchEncoding({name: x.tolist() for name, x in batch.items()})
    assert session.generate(encoded, 6, repetition_penalty=1.5) == wanted
    floats = batch | {"attention_mask": batch["attention_mask"].float()}
    assert session.generate(floats, 6, repetition_penalty=1.5) == wanted
    rows = [{name: x[i] for name, x in batch.items()} for i in range(len(PROMPTS))]
    assert session.generate(rows, 6, repetition_penalty=1.5) == wanted
    one = {name: x[1:2] for name, x in batch.items()}  # as `return_tensors="pt"` gives it
    ids = [session.add(row, 6, repetition_penalty=1.5) for row in (rows[1], one)]
    while session.num_unfinished:
        session.step()
    assert session.result(ids[0]) == wanted[1]
    assert session.result(ids[1]).token_ids == wanted[1].token_ids
    del batch["attention_mask"]
    assert session.generate(batch, 6, repetition_penalty=1.5) != wanted


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_an_array_is_that_of_the_config(session, side):
    array = padded(PROMPTS, 0, side)["input_ids"]
    text = session.generate(array, 6)
    assert text == session.generate(array.tolist(), 6)
    session.model.generation_config.pad_token_id = 0
    wanted = session.generate(PROMPTS, 6)
    assert session.generate(array, 6) == session.generate(array.numpy(), 6) == wanted != text
    assert session.generate({"input_ids": array.tolist()}, 6) == wanted
    assert session.generate({"input_ids": PROMPTS}, 6) == wanted
    assert session.generate(array.tolist(), 6) == text  # a list is taken as it is
    session.model.generation_config.eos_token_id = [0, 1]
    with pytest.raises(ValueError, match=r"^prompts must say what padding is .* got \[0\] at the"):
        session.generate(array, 6)
    with pytest.raises(ValueError, match=r"^prompts must say what padding is"):
        session.generate(array, 6, eos=())  # an eos of the config may end a prompt
    assert len(session.generate(array[:1], 1)) == 1  # one row needs no padding


def test_a_row_of_padding_is_no_prompt(session):
    batch = {"input_ids": [[1, 2], [0, 0]], "attention_mask": [[1, 1], [0, 0]]}
    with pytest.raises(ValueError, match=r"^prompt must hold at least one token"):
        session.generate(batch, 2)
    assert session.num_unfinished == 0


@pytest.mark.parametrize("name", ["image_token_id", "image_token_index", "audio_token_id"])
def test_tokens_of_images_are_refused(name):
    model = build_model()
    setattr(model.config, name, 60)
    session = make_session(model)
    for prompts in ([[1], [2, 60]], torch.tensor([[60, 1]])):
        with pytest.raises(ValueError, match=f"^prompt must be text, got 60, which is {name} of"):
            session.generate(prompts, 2)
    assert session.num_unfinished == 0
    assert len(session.generate([[1, 2]], 2)) == 1


def test_tokens_of_images_stand_in_configs_of_encoders_too():
    transformers = pytest.importorskip("transformers")
    config = transformers.Phi4MultimodalConfig()
    image, audio = config.vision_config.image_token_id, config.audio_config.audio_token_id
    assert media_tokens(config) == {image: "image_token_id", audio: "audio_token_id"}
