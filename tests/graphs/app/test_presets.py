"""A model that a Python file defines, named on the command line."""

import pytest

from graphs.app.presets import definition, load

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
    assert definition(file)[0] is definition(f"{file}:OTHER")[0]  # it is run once
    other = load(f"{file}:OTHER")
    assert (str(other.dtype), other.config.vocab_size) == ("torch.float16", 96)
    assert str(load(file, dtype="bfloat16").dtype) == "torch.bfloat16"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "", "model must be a Python file with a model class MODEL and a config CONFIG, got"),
        ("from transformers import LlamaModel as MODEL", ":OTHER", "and a config OTHER, got"),
        ("raise RuntimeError('no\\nluck')", "", "a Python file that runs, got .*: no$"),
        ("import sys; sys.exit(3)", "", "model must be a Python file that runs, got .*: 3$"),
    ],
)
def test_files_that_define_none(tmp_path, text, name, message):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        definition(f"{path}{name}")
