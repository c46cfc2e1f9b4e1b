"""The command line, through typer's runner: reports, JSON, exit codes and errors of one line."""

import io
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import graphs
import graphs.app.parity
import graphs.app.run
from attn_ops import backend_names, support_table
from graphs.app.cli import app, main
from graphs.app.presets import PRESETS, load
from graphs.app.run import run
from graphs.app.tables import RunReport, print_run
from tests.kit.marks import slow

ROOT = Path(__file__).parents[3]


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def printed(report: RunReport) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        print_run(report, console)
    return captured.get().splitlines()


def in_words(report: RunReport) -> str:
    return " ".join(" ".join(printed(report)).split())


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


@pytest.mark.slow
def test_a_saved_model_compiled_and_dumped(saved, prompts, tmp_path, monkeypatch):
    where, reports, as_dict = tmp_path / "dump", [], RunReport.as_dict
    monkeypatch.setattr(RunReport, "as_dict", lambda self: reports.append(self) or as_dict(self))
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
    assert report["mode_asked"] == "FULL_DECODE_ONLY"
    assert report["steps"]["eager_ms"] > 0
    assert report["steps"]["compiled_ms"] > 0
    assert report["compile_seconds"] > 0
    assert report["cache_bytes"] > 0
    assert (where / "index.md").exists()
    assert report["dump"] == str(where)
    lines = printed(reports[0])
    words = report["session"]["matches_in_words"]
    assert set(words) == set(report["matches"])
    shown, matches = " ".join(" ".join(lines).split()), report["matches"]
    assert all(f"{name} {text}" in shown for name, text in words.items() if matches[name])
    assert all(name in shown.partition("no match: ")[2] for name in words if not matches[name])
    assert "share_products: 0" not in shown  # the reason stands in the dump and in JSON
    assert len(lines) + 5 <= 30  # `make demo` has 5 prompts more, and fits on a screen
    assert max(map(len, lines)) <= 120


@pytest.mark.usefixtures("uncompiled")
def test_the_report_of_the_default_preset():
    result = invoke("run", "--max-new-tokens", "4")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) <= 34  # passes take up to 6 where it is compiled
    assert max(map(len, lines)) <= 120
    assert sum(" -> " in line for line in lines) == 8
    out = " ".join(result.stdout.split())
    assert "not FLASH_ATTN" not in out  # `attn-ops backends` says why
    assert "asked for" not in out  # nobody did
    for text in (
        "llama-tiny, float32",
        "TORCH: first of the order of preference",
        "the others: attn-ops backends",
        "CUDA graphs none: the model is on cpu; CUDA graphs need a model on cuda graphs 0",
        "PASS: tokens identical to Transformers' generate for 8 of 8 prompts",
        "outputs vary yes",
        "n/a (CPU) captured",
        "a second",
        "KV cache 2 MiB",
        "--dump DIR writes one",
    ):
        assert text in out


@pytest.fixture
def with_tokenizer(saved):
    """The saved model, with a tokenizer of a word a token."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", "the", "cat", "sat"])}
    words |= {f"w{i}": i for i in range(len(words), 64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(saved)
    return saved


@pytest.mark.usefixtures("uncompiled")
def test_text_in_and_text_out(with_tokenizer, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("the cat\n[3, 4, 5]\n")
    report = run(str(with_tokenizer), prompts=path, max_new_tokens=6)
    first, second = report.as_dict()["outputs"]
    assert (first["prompt"], first["prompt_ids"]) == ("the cat", [3, 4])
    assert (second["prompt"], second["prompt_ids"]) == ("the cat sat", [3, 4, 5])
    words = ["", "", "<unk>", "the", "cat", "sat", *(f"w{i}" for i in range(6, 64))]
    for output in (first, second):
        assert output["text"] == " ".join(filter(None, (words[t] for t in output["token_ids"])))
        assert (len(output["token_ids"]), output["finish_reason"]) == (6, "length")
    assert f'"the cat" -> {json.dumps(first["text"])} (length)' in in_words(report)


@pytest.mark.usefixtures("uncompiled")
def test_token_ids_in_and_out(saved, prompts):
    report = run(str(saved), prompts=prompts, max_new_tokens=24)
    outputs, shown = report.as_dict()["outputs"], in_words(report)
    assert [len(o["prompt_ids"]) for o in outputs] == [3, 4, 40]
    assert all(o["prompt"] is None and o["text"] is None for o in outputs)
    for output in outputs:  # those that somebody asked for are shown in full
        assert f"-> {' '.join(map(str, output['token_ids']))} (length)" in shown
    assert "0 1 2 3 ... 40 tokens ->" in shown


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_drawn_at_random_in_another_dtype(saved, prompts):
    def tokens(*options: str) -> list[list[int]]:
        arguments = ["--model", str(saved), "--prompts", str(prompts), "--max-new-tokens", "4"]
        arguments += [*options, "--json"]
        report = json.loads(invoke("run", *arguments).stdout)
        assert report["ok"]  # parity is of greedy tokens
        assert (report["dtype"], report["device"]) == ("bfloat16", "cpu")
        return [output["token_ids"] for output in report["outputs"]]

    options = ["--temperature", "2", "--top-p", "0.9", "--dtype", "bfloat16", "--device", "cpu"]
    first = tokens(*options, "--seed", "3")
    assert first == tokens(*options, "--seed", "3")
    assert first != tokens(*options, "--seed", "4")


def test_a_pass_that_raises_is_one_line(saved, prompts):
    """A package's pass stops the compilation; its name is what counts."""
    from fx_passes import Pass, register_pass, unregister_pass

    class Raising(Pass):
        name, stage = "raising", "dynamo"

        def apply(self, graph):
            raise IndexError("tuple index out of range")

    register_pass(Raising)
    try:
        result = invoke("run", "--model", str(saved), "--prompts", str(prompts))
    finally:
        unregister_pass("raising")
        torch._dynamo.reset()
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "error: the pass 'raising' failed on the graph 'whole model': "
        "IndexError: tuple index out of range"
    )


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("transformers", "; pip install 'attn-ops[transformers]'"),
        ("torchao", "; pip install 'attn-ops[quantize]'"),
        ("my_kernels", ""),
    ],
)
def test_a_missing_library_is_named(saved, monkeypatch, missing, advice):
    def run(*arguments, **options):
        raise ModuleNotFoundError(f"No module named '{missing}.a'", name=f"{missing}.a")

    monkeypatch.setattr(graphs.app.run, "run", run)
    result = invoke("run", "--model", str(saved))
    assert result.exit_code == 2
    assert result.stderr == f"error: No module named '{missing}.a'{advice}\n"


@pytest.mark.usefixtures("uncompiled")
def test_a_tokenizer_that_does_not_load_is_named(saved):
    (saved / "tokenizer.json").write_text("{")
    result = invoke("run", "--model", str(saved))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: model must have a tokenizer that loads, got ")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "preset",
    ["llama-tiny", *slow(*(n for n in PRESETS if n.endswith("-tiny") and n != "llama-tiny"))],
)
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
            "model must be a preset, a directory or a Python file, got 'nope'; supported: smollm",
        ),
        (["--model", "."], "model must be a directory with a saved model, got '.'"),
        (["--model", "no.py"], "model must be a Python file that exists, got 'no.py'"),
        (["--backend", "NOPE"], "backend must be a known name, got 'NOPE'; supported: "),
        (["--backend", "FLASH_ATTN"], "backend FLASH_ATTN cannot be used: "),
        (["--max-new-tokens", "0"], "max_new_tokens must be a positive int, got 0"),
        (["--max-new-tokens", "5000"], "max_tokens must be at most the model's 1024"),
        (["--prompts", "missing.txt"], "prompts must be a text file, got missing.txt"),
        (["--dump", "."], "directory must be new, empty or an earlier dump"),
        (["--fast-prefill", "x"], "options['fast_prefill'] must be 'auto', 'on' or 'off', got 'x'"),
        (["--quantize", "int8"], "quantize must be known, got 'int8'; supported: off, fp8_row"),
        (["--dtype", "int8"], "dtype must be known, got 'int8'; supported: float32, bfloat16, fl"),
        (["--device", "tpu"], "device must be present, got tpu; supported: cpu"),
        (["--temperature", "-0.5"], "temperature must be "),
        (["--top-p", "0"], "top_p must be "),
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


def test_help_and_public_names_need_no_torch():
    """Which takes seconds to import."""
    assert set(graphs.__all__) <= set(dir(graphs))
    assert set(graphs._MODULES) == set(graphs.__all__)
    code = """
import sys
import graphs
from typer.testing import CliRunner
from graphs.app.cli import app
assert "llama-tiny" in CliRunner().invoke(app, ["run", "--help"]).output
assert "torch" not in sys.modules
from graphs import *
DecodeSession, dump
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match=r"^module 'graphs' has no attribute 'nope'$"):
        _ = graphs.nope


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


def test_backends_are_one_screen_and_why_says_the_rest():
    lines = invoke("backends").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    result = invoke("backends", "--why", "FLASH_ATTN")
    assert result.exit_code == 0
    for text in ("soft cap", "fp8_e4m3", "CUDA graphs", "on this machine"):
        assert text in result.stdout
    assert invoke("backends", "--why", "NOPE").exit_code == 2


@pytest.mark.slow
def test_bench():
    """A third party's backend, too: any that is registered."""
    arguments = ("--shape", "3x40", "--shape", "20", "--heads", "4,2,64", "--device", "cpu")
    result = invoke("bench", "FLEX", *arguments, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    names = ["FLEX", "TRITON", "TORCH"]
    assert [row["backend"] for row in rows] == names * 2
    for row in rows:
        assert (row["us"] is None) == (row["reason"] is not None)
        assert (row["percent"] is None) == (row["us"] is None or row["shape"] == "20")
        assert row["us"] is None or row["us"] > 0
    assert all(row["us"] for row in rows if row["backend"] != "TRITON")
    shown = invoke("bench", "TORCH", *arguments, "--dtype", "bfloat16").stdout
    assert "% of copy bandwidth" in shown
    for wrong, message in (
        (("NOPE",), "backend must be a known name, got 'NOPE'"),
        (("TORCH", "--shape", "3x"), "shape must be REQUESTSxCONTEXT or TOKENS, got '3x'"),
        (("TORCH", "--block-size", "0"), "block_size must be a positive int, got 0"),
        (("TORCH", "--heads", "4"), "heads must be as '32,8,128', got '4'"),
        (("TORCH", "--dtype", "int8"), "dtype must be known, got 'int8'"),
    ):
        result = invoke("bench", *wrong)
        assert result.exit_code == 2
        assert message in result.stderr


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


def test_quantized_by_torchao():
    pytest.importorskip("torchao")
    report = run(max_new_tokens=4, quantize="fp8_row", backend="TORCH")
    assert report.ok
    assert report.session.matches["quantize_output"] == 1, "of the layer, which is compiled once"
    model = SimpleNamespace(modules=lambda: [torch.nn.Linear(16, 24)], get_output_embeddings=list)
    with pytest.raises(ValueError, match="sizes are multiples of 16, got none"):
        graphs.app.run.quantize_linear_layers(model)
