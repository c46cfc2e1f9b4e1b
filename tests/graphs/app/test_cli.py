"""The command line, through typer's runner: reports, JSON, exit codes and errors of one line."""

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import graphs.app.parity
from attn_ops import backend_names, support_table
from graphs.app.cli import app, main
from graphs.app.presets import PRESETS, load
from graphs.app.run import read_prompts, run

ROOT = Path(__file__).parents[3]


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def uncompiled(monkeypatch):
    """Compiling is tested elsewhere."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("1 2 3\n\n[4, 5, 6, 7]\n" + " ".join(str(i % 64) for i in range(40)) + "\n")
    return path


@pytest.fixture
def saved(make_model, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_compiled_and_dumped(saved, prompts, tmp_path):
    where = tmp_path / "dump"
    result = invoke(
        "run", "--model", str(saved), "--prompts", str(prompts), "--max-new-tokens", "6",
        "--backend", "TORCH", "--dump", str(where), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["num_graphs"], report["num_breaks"], report["num_recompiles"]) == (1, 0, 0)
    assert (report["backend"], report["backend_why"]) == ("TORCH", "requested")
    assert report["matches"]["outline_layers"] == 2
    parity = report["parity"]
    assert (parity["num_identical"], parity["num_prompts"], parity["num_tokens"]) == (3, 3, 18)
    assert parity["max_logits_difference"] < 1e-4
    assert report["ok"]
    assert report["outputs_vary"]
    assert report["max_tokens_per_step"] < 40  # the longest prompt comes in chunks
    assert report["graph_mode_asked"] == "FULL_DECODE_ONLY"
    assert report["steps"]["eager_ms"] > 0
    assert report["steps"]["compiled_ms"] > 0
    assert report["compile_seconds"] > 0
    assert report["cache_bytes"] > 0
    assert (where / "index.md").exists()
    assert report["dump"] == str(where)


@pytest.mark.usefixtures("uncompiled")
def test_the_report_of_the_default_preset():
    result = invoke("run", "--max-new-tokens", "4")
    assert result.exit_code == 0, result.output
    out = " ".join(result.stdout.split())
    for text in (
        "llama-tiny, float32",
        "TORCH: first of the order of preference",
        "not FLASH_ATTN",
        "FULL_DECODE_ONLY asked for, NONE used",
        "PASS: tokens identical to Transformers' generate for 8 of 8 prompts",
        "outputs vary yes",
        "n/a (CPU) captured",
        "a second",
        "KV cache 2 MiB",
        "--dump DIR writes one",
    ):
        assert text in out


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("-tiny")])
def test_presets_vary_and_equal_transformers(preset):
    report = run(preset, max_new_tokens=8)
    assert report.ok
    assert report.outputs_vary
    assert report.parity.num_identical == 8
    assert report.parity.max_logits_difference < 1e-4


@pytest.mark.usefixtures("uncompiled")
def test_no_parity_is_exit_code_1(monkeypatch, saved, prompts):
    generate = graphs.app.parity.Reference.generate

    def off_by_one(self, prompt, max_new_tokens):
        tokens, logits = generate(self, prompt, max_new_tokens)
        return [(t + 1) % 64 for t in tokens], logits

    monkeypatch.setattr(graphs.app.parity.Reference, "generate", off_by_one)
    result = invoke("run", "--model", str(saved), "--prompts", str(prompts))
    assert result.exit_code == 1
    assert "FAIL: tokens identical" in " ".join(result.stdout.split())


def test_a_preset_must_vary(make_model):
    parity = graphs.app.parity.Parity(8, 8, 128, 3, 0, 0.0, 0.0, True)
    assert not parity.varied
    assert not graphs.app.parity.Parity(8, 8, 128, 64, 5, 0.0, 0.0, True).varied
    assert graphs.app.parity.Parity(8, 8, 128, 64, 4, 0.0, 0.0, True).varied


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--model", "nope"],
            "model must be a preset or a directory, got 'nope'; supported: llama-",
        ),
        (["--model", "."], "model must be a directory with a saved model, got '.'"),
        (["--backend", "NOPE"], "backend must be a known name, got 'NOPE'; supported: "),
        (["--backend", "FLASH_ATTN"], "backend FLASH_ATTN cannot be used: "),
        (["--max-new-tokens", "0"], "max_new_tokens must be a positive int, got 0"),
        (
            ["--max-new-tokens", "5000"],
            "max_tokens must be at most the model's 1024",
        ),
        (["--prompts", "missing.txt"], "prompts must be a text file, got missing.txt"),
        (["--dump", "."], "directory must be new, empty or an earlier dump"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("not a dump")
    result = invoke("run", *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [x for x in result.stderr.splitlines() if not x.startswith("cudagraph_mode")]
    assert line.startswith(f"error: {message}")
    assert [p.name for p in tmp_path.iterdir()] == ["other.txt"]


@pytest.mark.parametrize("text", ["1 x", "[1, 2", '["a"]', "[1.5]", "[true]", '{"a": 1}'])
def test_bad_prompt_lines_name_their_place(text, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(f"1 2\n{text}\n")
    with pytest.raises(
        ValueError, match=r"^prompts must be token ids between spaces or a JSON list"
    ):
        read_prompts(path)
    result = invoke("run", "--prompts", str(path))
    assert result.exit_code == 2
    assert f"{path}:2" in result.stderr


def test_prompt_files(prompts, tmp_path):
    assert read_prompts(prompts)[:2] == [[1, 2, 3], [4, 5, 6, 7]]
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"^prompts must hold at least one line"):
        read_prompts(tmp_path / "empty.txt")


def test_backends():
    result = invoke("backends")
    assert result.exit_code == 0
    for name in backend_names():
        assert name in result.stdout
    rows = json.loads(invoke("backends", "--json").stdout)
    assert [row["backend"] for row in rows] == backend_names()
    torch_row = next(row for row in rows if row["backend"] == "TORCH")
    assert torch_row["available"]
    assert torch_row["reason"] is None
    assert (torch_row["head_sizes"], torch_row["cuda_graphs"]) == ("any", "never")
    assert all(row["available"] == (row["reason"] is None) for row in rows)


def test_the_page_of_backends_holds_the_support_table():
    text = (ROOT / "docs" / "backends.md").read_text()
    assert support_table.markdown() in text, "make docs"
    assert support_table.update(text) == text
    begin, end = support_table.BEGIN, support_table.END
    old = f"a\n{begin}\nold\n{end}\nb"
    assert support_table.update(old) == f"a\n{support_table.markdown()}\nb"
    with pytest.raises(ValueError, match=r"^text must hold the markers"):
        support_table.update("no table")


def test_the_console_script():
    scripts = [p for p in entry_points(group="console_scripts") if p.name == "attn-ops"]
    assert scripts[0].load() is main
    assert invoke().exit_code == 2  # no command: the help
    assert invoke("run", "--nope").exit_code == 2


def test_presets_are_reproducible():
    first, second = (load("phi3-tiny").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
