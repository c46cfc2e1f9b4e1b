"""Arguments of the command line: refused in one line, before torch is imported."""

import json
import re
import subprocess
import sys

import pytest

import graphs
from attn_ops import backend_names
from graphs.app import arguments
from graphs.app.arguments import RunArguments

BAD = [
    (
        {"model": "nope"},
        "model must be a preset, a directory or a Python file, got 'nope'; supported: llama-",
    ),
    ({"model": "."}, "model must be a directory with a saved model, got '.' without config.json"),
    ({"backend": "NOPE"}, "backend must be a known name, got 'NOPE'; supported: AUTO, "),
    ({"max_new_tokens": 0}, "max_new_tokens must be a positive int, got 0"),
    ({"fast_prefill": "x"}, "fast_prefill must be known, got 'x'; supported: off, auto, on"),
    ({"quantize": "int8"}, "quantize must be known, got 'int8'; supported: off, fp8_row, fp8_st"),
    ({"dump": ".."}, "directory must be new, empty or an earlier dump, got "),
    ({"dtype": "int8"}, "dtype must be known, got 'int8'; supported: float32, bfloat16, float16"),
    ({"device": "tpu"}, "device must be cpu, cuda or cuda:N, got 'tpu'"),
    ({"temperature": -0.5}, "temperature must be 0 or more, got -0.5"),
    ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
    ({"top_p": 0.0}, "top_p must be greater than 0 and at most 1, got 0.0"),
    ({"seed": 2**63}, "seed must be an int of 64 bits, got 9223372036854775808"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: str(value)[:24])
def test_a_bad_argument_is_named(fields, message, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        RunArguments(**fields)


def test_an_error_needs_no_torch(tmp_path):
    """Which would take seconds: arguments, a prompts file and `--help`."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "prompts.txt").write_text("1 2\n3 600\n")
    calls = [
        ["run", f"--{name.replace('_', '-')}", str(value)]
        for fields, _ in BAD
        for name, value in fields.items()
    ]
    calls += [["run", "--nope"], ["nope"], ["run", "--prompts", "prompts.txt"], ["run", "--help"]]
    code = f"""
import json, sys
from typer.testing import CliRunner
from graphs.app.cli import app
def outcome(call):
    result = CliRunner().invoke(app, call)
    return result.exit_code, result.output, "torch" in sys.modules
print(json.dumps([outcome(call) for call in {calls}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True
    )
    *refused, shown = json.loads(done.stdout)
    assert [(status, torch) for status, _, torch in refused] == [(2, False)] * len(refused)
    for (_, output, _), (_, message) in zip(refused, BAD, strict=False):
        assert output.startswith(f"error: {message}")
        assert len(output.splitlines()) == 1
    assert refused[-1][1].endswith("from 0 to 511, got 600 at prompts.txt:2:3\n")
    assert (shown[0], shown[2]) == (0, False)
    assert "llama-tiny" in shown[1]


def test_the_names_of_backends_are_those_of_the_registry():
    assert arguments.backend_names() == backend_names()


@pytest.mark.slow
def test_public_names_are_imported_when_they_are_used():
    assert set(graphs.__all__) <= set(dir(graphs))
    assert set(graphs._MODULES) == set(graphs.__all__)
    code = "import sys, graphs; before = 'torch' in sys.modules; import graphs.dumps.dump; "
    code += "from graphs import *; assert not before and callable(graphs.dump); DecodeSession"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match=r"^module 'graphs' has no attribute 'nope'$"):
        _ = graphs.nope
