"""The program of docs/several_gpus.md, as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.models import build_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_program_runs(tmp_path):
    build_model("llama").save_pretrained(tmp_path / "my_model")
    text = (ROOT / "docs" / "several_gpus.md").read_text()
    assert text.count("\n") <= 60
    program = re.search(r"```python\n(.*?)```", text, re.S)[1]
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len([line for line in done.stdout.splitlines() if line.startswith("[")]) == 2
