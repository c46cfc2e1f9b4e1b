"""The page of a dump: its numbers, what it refuses, and that a browser shows it."""

import base64
import json
import re
import shutil
import subprocess

import pytest
import torch
from typer.testing import CliRunner

import fx_passes
import graphs
from graphs.app.cli import app
from graphs.dumps.difference import rows
from graphs.dumps.kernels import kernels
from graphs.dumps.page import write_page

BROWSER = shutil.which("chromium")
FAILS = "<script>document.title = 'broken'</script>"


def block(page) -> dict:
    text = page.read_text()
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*)</script>', text)[1]
    )


@pytest.fixture(scope="module")
def dumped(tmp_path_factory, make_model):
    """A dump of three layers, and its session's report."""
    model = make_model("llama", num_hidden_layers=3)
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = graphs.DecodeSession(compiled, max_batch_size=2, max_tokens=32)
    with graphs.dump(tmp_path_factory.mktemp("page") / "a b") as directory:
        session.generate([[1, 2, 3]], 2)
        report = session.report()
    return directory, report, session


@pytest.fixture
def copied(dumped, tmp_path):
    return shutil.copytree(dumped[0], tmp_path / "dump")


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
        ("dump.json", '{"format": "attn-ops dump", "version": 9}', "known, got 9; supported: 2"),
        ("dump.json", '{"format": "attn-ops dump", "version": 2}', "without index"),
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


def test_a_difference_shows_only_what_changed():
    before = "\n".join(f"line {i}" for i in range(20))
    found = rows(before, before.replace("line 9\n", "line nine\nnew\n"))
    assert found["num_left_out"] == 0
    assert [(kind, i, j) for kind, i, _, j, _ in found["rows"]] == [
        ("...", 0, 0), ("=", 8, 8), ("=", 9, 9), ("~", 10, 10), ("+", 0, 11),
        ("=", 11, 12), ("=", 12, 13),
    ]  # fmt: skip


def test_kernels_of_triton_name_the_nodes_of_the_graph():
    code = """\
import torch


# kernel path: /tmp/x.py
# Topologically Sorted Source Nodes: [x, y], Original ATen: [aten.mul, aten.add]
# Graph fragment:
#   %mul : Tensor "f32[8]" = call_function[target=torch.ops.aten.mul.Tensor](args = (%a, 2))
#   %add : Tensor "f32[8]" = call_function[target=torch.ops.aten.add.Tensor](args = (%mul, 1))
triton_poi_fused_add_mul_0 = async_compile.triton('triton_poi_fused_add_mul_0', '''
def triton_poi_fused_add_mul_0(in_ptr0): pass
''', device_str='cuda')


def call(args):
        triton_poi_fused_add_mul_0.run(arg0_1, buf0, 8, stream=stream0)
"""
    (call,) = kernels(code)
    assert call["name"] == "triton_poi_fused_add_mul_0"
    assert call["aten"] == ["aten.mul", "aten.add"]
    assert call["graph_nodes"] == ["mul", "add"]


DRIVER = """<script>addEventListener("load", () => {
  const key = (key, target = document.body) =>
    target.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
  const out = {hashes: [], views: {}, ready: performance.now()};
  for (const one of ["j", "j", "k"]) { key(one); out.hashes.push(location.hash); }
  for (const one of ["ran", "model", "pass", "kernel", "timeline", "files"]) {
    location.hash = one; go();
    out.views[one] = document.querySelector("section.on").innerText;
  }
  document.querySelectorAll("tr[data-graph] a")[1].click(); go();
  out.nodes = [...document.querySelectorAll("#drawn g.node title")].map(one => one.textContent);
  key("/");
  const input = document.getElementById("search");
  out.focused = document.activeElement === input;
  input.value = "attention decoder";
  input.dispatchEvent(new Event("input"));
  out.found = [...document.querySelectorAll("#found a")].map(one => one.textContent);
  key("Enter", input);
  setTimeout(() => {
    out.selected = document.querySelector("#drawn g.on title")?.textContent;
    out.loaded = performance.getEntriesByType("resource").map(one => one.name);
    out.width = document.documentElement.scrollWidth;
    const pre = document.createElement("pre");
    pre.id = "driven";
    pre.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(out))));
    document.body.append(pre);
  }, 200);
});</script>"""


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_in_a_browser(copied):
    """From file://: no error, no request, and keys, search and deep links do what they say."""
    page = copied / "index.html"
    page.write_text(page.read_text() + DRIVER)
    done = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={copied.parent / 'profile'}", "--window-size=1280,900",
            "--virtual-time-budget=3000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    encoded = re.search(r'<pre id="driven">(.*?)</pre>', done.stdout)
    assert encoded, done.stdout[-2000:]
    out = json.loads(base64.b64decode(encoded[1]))
    data = block(page)
    changed = [f"#pass={i}" for i, one in enumerate(data["passes"]) if one["difference"]]
    assert out["hashes"][0] in changed
    layer = next(g for g in data["graphs"] if g["num_calls"] == 3)
    drawn = {title.split()[0] for title in out["nodes"]}
    products = {n["name"] for n in layer["nodes"] if n["op"] in ("mm", "attention")}
    assert products < drawn <= {n["name"] for n in layer["nodes"]}
    assert all(len(text) > 40 for text in out["views"].values()), out["views"]
    assert out["ready"] < 2000
    assert out["focused"]
    assert out["found"]
    assert all(
        {"attention", "decoder"} <= set(re.findall("attention|decoder", one.lower()))
        for one in out["found"]
    )
    assert out["selected"]
    assert out["loaded"] == []
    assert out["width"] <= 1280
