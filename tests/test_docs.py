"""The pages: links and paths in them exist, lines are short, every folder has its sentence."""

import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kit.models import build_model
from tests.kit.text import small_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/*.md")])
PRODUCT = ("attn_ops", "fx_passes", "graphs")
FOLDERS = (*PRODUCT, "tests", "benchmarks", "examples", "docs")
UNCLEAR = ("stands? behind", "as of", "of one's own", "in the air", "lands")
LONGEST = 120


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request) -> Path:
    return request.param


def prose(page: Path) -> list[tuple[int, str]]:
    """Numbered lines outside code."""
    lines, code = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            code = not code
        elif not code and not line.startswith("    "):
            lines.append((number, line))
    return lines


def test_links_lead_somewhere(page):
    for number, line in prose(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if "://" not in target:
                path, _, anchor = target.partition("#")
                file = page.parent / path if path else page
                assert file.exists(), f"line {number}: {target}"
                assert not anchor or anchor in anchors(file), f"line {number}: {target}"


def anchors(file: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_paths_exist(page):
    for number, line in prose(page):
        for path in re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w/.]*\w", line):
            assert (ROOT / path).exists(), f"line {number}: {path}"


def test_lines_are_short(page):
    """Rows of a table cannot be broken."""
    for number, line in prose(page):
        assert len(line) <= LONGEST or line.startswith("|"), f"line {number} has {len(line)}"


def test_words_are_plain(page):
    for number, line in prose(page):
        found = re.search(rf"\b({'|'.join(UNCLEAR)})\b", line)
        assert found is None, f"line {number}: {found}"


def folders() -> set[str]:
    """Folders of Python files; tests mirror the product, so only the others of theirs are asked."""
    found = {f.parent.relative_to(ROOT) for name in FOLDERS for f in ROOT.glob(f"{name}/**/*.py")}
    known = {folder for folder in found if "__pycache__" not in folder.parts}
    mirrors = {*PRODUCT, "benchmarks", "gpu"}
    return {
        str(folder)
        for folder in known
        if folder.parts[0] != "tests" or len(folder.parts) < 2 or folder.parts[1] not in mirrors
    }


def test_every_folder_and_every_page_has_a_sentence():
    text = (ROOT / "docs" / "README.md").read_text()
    missing = {folder for folder in folders() if f"`{folder}/`" not in text}
    assert missing == set()
    named = set(re.findall(r"^\| `([\w/]+)/` \|", text, flags=re.MULTILINE))
    assert {folder for folder in named if not (ROOT / folder).is_dir()} == set()
    pages = {p.name for p in ROOT.glob("docs/*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in text} == set()


def test_decisions_are_where_the_page_says():
    text = (ROOT / "docs" / "README.md").read_text()
    table = text.split("## Where is it decided")[1].split("\n## ")[0]
    places = re.findall(r"`([\w.]+)` in `([\w/.]+)`", table)
    assert len(places) >= table.count("\n| ") - 2
    for name, path in places:
        text = (ROOT / path).read_text()
        for part in name.split("."):
            defined = rf"^(?: *(?:class|def) {part}\b|{part}\b.*=)"
            assert re.search(defined, text, re.MULTILINE), f"{name} in {path}"


@pytest.mark.slow
def test_the_readme_s_code_runs(tmp_path):
    """In a process of its own: nothing that another test has imported helps it."""
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    build_model("llama", "eager", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    program = f"path = {str(tmp_path)!r}\n" + code[0].replace("4096", "128")
    program += "assert len(session.generate(['Hello'], 32)[0].token_ids) == 32\n"
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip()


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]


def test_the_readme_names_what_can_be_installed():
    text = (ROOT / "README.md").read_text()
    assert "pip install 'attn-ops[transformers,triton]'" in text
    users = set(extras()) - {"test", "lint", "transformers", "triton"}
    assert {name for name in users if f"`[{name}]`" not in text} == set()


def test_the_demo_installs_neither_tests_nor_linters():
    named = {re.match(r"[\w-]+", r)[0] for r in (*extras()["test"], *extras()["lint"])}
    assert {"pytest", "ruff", "pyright", "peft", "torchao"} <= named
    assert {re.match(r"[\w-]+", r)[0] for r in extras()["dump"]} == {"depyf"}

    def installed(target: str) -> set[str]:
        command = ["make", "-n", target, "VENV=none"]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return {x for e in re.findall(r"-e '\.\[(.*?)\]'", printed.stdout) for x in e.split(",")}

    assert installed("demo") == {"transformers", "triton", "dump", "demo"}
    assert installed("test-all") == {*installed("demo"), "test"}
    assert installed("lint") == {*installed("test-all"), "lint"}


def test_troubleshooting_names_options_that_exist():
    from graphs import SamplingParams, SessionOptions
    from graphs.app.cli import backends, run

    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    fields = {f.name for c in (SessionOptions, SamplingParams) for f in dataclasses.fields(c)}
    elsewhere = {"backend", "do_sample", "eos", "fullgraph", "measure", "profile", "TORCH_LOGS"}
    named = set(re.findall(r"\b(\w+)=", text))
    assert named - elsewhere - fields == set()
    options = {name.replace("-", "_") for name in re.findall(r" --([\w-]+)", text)}
    known = {name for command in (run, backends) for name in inspect.signature(command).parameters}
    assert options - {"json"} <= known
