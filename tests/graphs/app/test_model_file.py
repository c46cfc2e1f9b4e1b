"""A model that a Python file defines, named on the command line."""

import pytest

from graphs.app.arguments import RunArguments
from graphs.app.model_file import definition, is_file
from graphs.app.presets import load, vocab_size

FILE = """
from transformers import LlamaConfig, LlamaForCausalLM as MODEL
SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
CONFIG = LlamaConfig(**SIZES, vocab_size=64, dtype="float32")
OTHER = LlamaConfig(**SIZES, vocab_size=96, dtype="float16")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(FILE)
    return str(path)


def test_a_file_of_models(file):
    assert is_file(file)
    assert is_file(f"{file}:OTHER")
    assert not is_file("llama-tiny")
    assert (vocab_size(file), vocab_size(f"{file}:OTHER")) == (64, 96)
    assert definition(file)[0] is definition(f"{file}:OTHER")[0]  # it is run once
    assert str(load(f"{file}:OTHER").dtype) == "torch.float16"
    assert str(load(file, dtype="bfloat16").dtype) == "torch.bfloat16"
    RunArguments(model=f"{file}:OTHER")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "", "model must be a Python file with MODEL, got"),
        ("MODEL = 1", "", "model must be a Python file with CONFIG, got"),
        ("MODEL = CONFIG = 1", ":OTHER", "model must be a Python file with OTHER, got"),
        (
            "raise RuntimeError('no\\nluck')",
            "",
            "model must be a Python file that runs, got .*: no$",
        ),
        ("import sys; sys.exit(3)", "", "model must be a Python file that runs, got .*: 3$"),
        ("MODEL = CONFIG = 1", "", "MODEL of .* must be a class of .* that generate, got 1"),
        (
            "from transformers import LlamaModel as MODEL; CONFIG = 1",
            "",
            "MODEL of .* must be a class of .* that generate, got LlamaModel",
        ),
        (
            "from transformers import LlamaForCausalLM as MODEL; CONFIG = 1",
            "",
            "CONFIG of .* must be a config of Transformers, got 1",
        ),
    ],
)
def test_files_that_define_none(tmp_path, text, name, message):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        definition(f"{path}{name}")


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"model must be a Python file that exists, got 'no.py'"):
        RunArguments(model="no.py")
