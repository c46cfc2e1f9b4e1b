"""The page of a dump: its numbers, and what it refuses."""

import json
import re

import pytest
from typer.testing import CliRunner

from graphs.app.cli import app
from graphs.dumps.page import write_page
from tests.graphs.dumps.dumped import block

FAILS = "<script>document.title = 'broken'</script>"


def test_numbers_are_those_of_the_report_and_of_the_files(dumped):
    directory, report, session = dumped
    data = block(directory / "index.html")
    (shown,) = data["sessions"]
    for name, value in json.loads(json.dumps(report.as_dict())).items():
        assert shown[name] == value, name
    weights = sum(p.nbytes for p in session.original.parameters())
    assert shown["memory"] == {
        "weights": weights, "cache": session.cache.num_bytes, "graph pools": report.graph_bytes,
    }  # fmt: skip
    records = session.compile_record.passes
    assert [(p["name"], p["matches"], p["skipped"]) for p in data["passes"]] == [
        (p.pass_name, p.matches, p.skipped) for p in records
    ]
    for graph in data["graphs"]:
        text = (directory / graph["file"]).read_text()
        called = [n for n in graph["nodes"] if n["target"].startswith(("aten.", "attn_ops."))]
        assert len(called) == len(re.findall(r"= torch\.ops\.(?:aten|attn_ops)\.", text)) > 0
    layer = next(g for g in data["graphs"] if g["num_calls"] == 3)
    assert {n["by"] for n in layer["nodes"]} >= {None, "collapse_views"}
    assert any("modeling_llama.py" in n["line"] for n in layer["nodes"])
    for code in data["kernels"]:
        text = (directory / code["file"]).read_text()
        assert all(call["call"][:100] in text for call in code["calls"])
        assert all(call["source"] in text for call in code["calls"])
    assert any("aten.mm" in call["aten"] for code in data["kernels"] for call in code["calls"])


def test_it_is_made_again(copied):
    page = copied / "index.html"
    before = page.read_text()
    page.unlink()
    result = CliRunner().invoke(app, ["inspect", str(copied)])
    assert (result.exit_code, result.output.strip()) == (0, str(page))
    assert page.read_text() == before


def test_names_do_not_become_markup(copied):
    path = copied / "dump.json"
    data = json.loads(path.read_text())
    data["index"]["notes"] = [f"</script>{FAILS}"]
    data["passes"][0]["name"] = f"</script>{FAILS}"
    path.write_text(json.dumps(data))
    text = write_page(copied).read_text()
    assert FAILS not in text
    assert block(copied / "index.html")["passes"][0]["name"] == f"</script>{FAILS}"


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("index.md", "# mine", "directory must be a dump, got "),
        ("dump.json", None, "dump must be complete, got .* without dump.json"),
        ("dump.json", '{"format": ', "dump must be complete, got a truncated "),
        ("dump.json", "[]", "dump.json must be of a dump"),
        ("dump.json", '{"format": "attn-ops dump", "version": 9}', "known, got 9; supported: 3"),
        ("dump.json", '{"format": "attn-ops dump", "version": 3}', "without index"),
        ("final/02-decoder_layer.py", None, "without final/02-decoder_layer.py"),
    ],
)
def test_what_is_no_whole_dump_is_refused(copied, name, text, error):
    (copied / name).unlink()
    if text is not None:
        (copied / name).write_text(text)
    with pytest.raises(ValueError, match=error):
        write_page(copied)
    result = CliRunner().invoke(app, ["inspect", str(copied)])
    assert result.exit_code == 2
    assert "error: " in result.output


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "passes/../../secret", 5])
def test_no_path_leaves_the_folder(copied, name):
    (copied.parent / "secret").write_text("secret")
    data = json.loads((copied / "dump.json").read_text())
    data["inductor"] = [name]
    (copied / "dump.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="file of a dump must be inside it, got "):
        write_page(copied)
    (copied / "link").symlink_to(copied.parent / "secret")
    data["inductor"] = ["link"]
    (copied / "dump.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="file of a dump must be inside it, got 'link'"):
        write_page(copied)


def test_every_pass_says_what_it_is_for(copied):
    passes = block(copied / "index.html")["passes"]
    said = {one["name"]: one["purpose"] for one in passes}
    assert said["outline_layers"].startswith("Replace repeated layers by calls of one submodule")
    assert all(purpose.endswith(".") for purpose in said.values()), said
