"""The programs of docs/generate_batch.md and docs/trl.md; TRL's on a CPU, as the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.models import build_model
from tests.kit.text import small_tokenizer

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["generate_batch", "trl"])
def test_programs_run(page, tmp_path):
    if page == "trl":
        pytest.importorskip("trl")
    tokenizer = small_tokenizer()
    model = build_model("llama", vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0)
    model.save_pretrained(tmp_path / "my_model")
    tokenizer.save_pretrained(tmp_path / "my_model")
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert text.count("\n") <= 60
    program = re.search(r"```python\n(.*?)```", text, re.S)
    code = program[1].replace('output_dir="out"', 'output_dir="out", use_cpu=True, bf16=False')
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    if page == "generate_batch":
        assert done.stdout.count("req_") == 2
