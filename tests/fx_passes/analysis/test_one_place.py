"""What passes ask of a graph is answered in one file each."""

from pathlib import Path

import pytest

import fx_passes

ROOT = Path(fx_passes.__file__).parent
ASKED = {
    "nn_module_stack": "layer_paths.py",
    "is_write": "memory.py",
    "untyped_storage": "memory.py",
    '"tangents"': "training.py",
    "is_grad_enabled": "training.py",
    ".node.expr": "sizes.py",
    ".node.hint": "sizes.py",
    'meta.get("': "values.py",
}


@pytest.mark.parametrize("words", ASKED)
def test_a_question_is_answered_in_one_file(words):
    files = [path.name for path in ROOT.rglob("*.py") if words in path.read_text()]
    assert files == [ASKED[words]]
