"""The page of a dump in a browser: keys, search, addresses, and that names stay text."""

import json
from typing import Any

import pytest
import torch

import fx_passes
import graphs
from graphs.dumps.page import write_page
from tests.graphs.dumps.browser import BROWSER, drive, rendered_ms
from tests.graphs.dumps.dumped import block

pytestmark = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")


def test_keys_and_search(copied):
    page = copied / "index.html"
    out = drive(
        page,
        """
        out.views = texts("nav a");
        out.hashes = [];
        for (const one of ["j", "n", "k"]) {
          key(one);
          await wait();
          out.hashes.push(location.hash);
        }
        key("2");
        await wait();
        out.second = all("section.on").map(one => one.id);
        key("/");
        out.focused = document.activeElement === document.getElementById("search");
        const input = await search_("attention decoder");
        out.found = texts("#found a");
        key("ArrowDown", input);
        const href = document.querySelector("#found a.on").hash;
        key("Enter", input);
        await wait();
        out.went = [href, location.hash];
        await search_("lm_head");
        out.first = texts("#found a")[0];
        await search_("mm decoder");
        const node = all("#found a").find(one => one.hash.startsWith("#graph="));
        out.node = node.hash.split("=").pop();
        node.click();
        await wait();
        out.selected = texts("#drawn g.on title");
        await search_("no such thing");
        out.nothing = texts("#found");
        """,
    )
    data = block(page)
    assert out["views"] == ["What ran", "Model", "Passes", "Kernels", "Timeline", "Files"]
    changed = [f"#pass={i}" for i, one in enumerate(data["passes"]) if one["difference"]]
    assert out["hashes"][0] in changed
    assert len(set(out["hashes"])) == min(len(changed), 2)
    assert out["second"] == ["model"]
    assert out["focused"]
    assert out["found"]
    assert all("attention" in one and "decoder" in one for one in map(str.lower, out["found"]))
    assert out["first"].startswith("module "), "those before nodes"
    assert out["went"][0] == out["went"][1] != ""
    assert out["node"] in out["selected"][0]
    assert len(out["selected"]) == 1
    assert out["nothing"] == ["nothing found"]


def test_the_views_hold_what_the_data_says(copied):
    page = copied / "index.html"
    out = drive(
        page,
        """
        out.text = {};
        for (const one of ["ran", "model", "pass", "kernel", "timeline", "files"]) {
          await open_(`#${one}`);
          out.text[one] = document.querySelector("section.on").innerText;
          out[`width ${one}`] = document.documentElement.scrollWidth;
        }
        out.files = all("section.on a").map(one => one.getAttribute("href"));
        await open_("#graph=1");
        out.few = texts("#drawn g.node title");
        all("#drawn button").find(one => one.textContent.includes("too")).click();
        out.every = texts("#drawn g.node title");
        await open_("#kernel");
        out.calls = all("#kernel tr[id]").length;
        out.times = texts("#kernel tr[id] td:nth-child(4)").filter(text => text.includes(" x "));
        const isOfViews = one => one.name === "collapse_views" && one.places.length;
        await open_(`#pass=${data.passes.findIndex(isOfViews)}`);
        const rows = all("#shown tr.link");
        out.became = rows.map(one => [...one.cells].map(cell => cell.textContent));
        const boxes = () => texts("#shown .flow g title").map(text => text.split(" ")[0]);
        out.first = boxes();
        rows.at(-1).click();
        out.last = boxes();
        """,
    )
    data = block(page)
    (session,), layer = data["sessions"], data["graphs"][1]
    assert layer["num_calls"] == 3
    assert all(len(text) > 40 for text in out["text"].values()), out["text"]
    for word in (session["model"], session["backend"], session["backend_why"], session["mode_why"]):
        assert word in out["text"]["ran"]
    assert "3 x LlamaDecoderLayer, compiled once" in out["text"]["model"]
    assert all(one["name"] in out["text"]["pass"] for one in data["passes"])
    assert set(data["files"]) <= set(out["files"])
    assert any(name.startswith("depyf/") for name in data["files"])
    names = {n["name"] for n in layer["nodes"] if n["type"] != "SymInt"}
    ours = {n["name"] for n in layer["nodes"] if n["by"] or n["op"] in ("mm", "attention")}
    assert ours < {title.splitlines()[0] for title in out["few"]} < names
    assert {title.splitlines()[0] for title in out["every"]} == names
    assert out["calls"] == sum(len(code["calls"]) for code in data["kernels"])
    ran = [one for one in data["timeline"]["calls"] if one["graph"] >= 0]
    assert len(out["times"]) == len(ran) > 0
    assert f"{100 * ran[0]['of_step']:.1f} %" in "".join(out["times"])
    views = (one for one in data["passes"] if one["name"] == "collapse_views")
    places = next(one["places"] for one in views if one["places"])
    assert [row[0] for row in out["became"]] == [str(kind["num"]) for kind in places]
    assert out["became"][0][1:] == ["2 x view, permute", "view by strides"]
    for found, kind in ((out["first"], places[0]), (out["last"], places[-1])):
        drawn = kind["drawn"][0]
        assert found == [node["name"] for side in drawn.values() for node in side]
    assert all(width <= 1280 for name, width in out.items() if name.startswith("width"))


@pytest.mark.parametrize(
    ("fragment", "selector", "text"),
    [
        ("#module=model.layers.0.mlp", "#drawn h2", "model.layers.0.mlp, LlamaMLP"),
        ("#pass=1", "#shown h1", "outline_layers"),
        ("#kernel=1=extern_kernels.mm", "#kernel tr[id] a", "extern_kernels.mm"),
        ("#graph=1=attention", "#drawn .side h3", "attention"),
        ("#graph=1=%E0%A4%A", "h1", "LlamaForCausalLM"),
        ("#constructor", "h1", "LlamaForCausalLM"),
    ],
)
@pytest.mark.slow
def test_an_address_opens_its_view(copied, fragment, selector, text):
    """In the window, while the document itself is not scrolled: pictures of it are not blank."""
    out = drive(
        copied / "index.html",
        f"""
        await wait();
        const begins = one => one.textContent.startsWith({json.dumps(text)}) && one.offsetParent;
        out.tops = all({json.dumps(selector)}).filter(begins)
          .map(one => one.getBoundingClientRect().top);
        out.scrolled = [scrollX, scrollY, document.body.scrollHeight - innerHeight];
        """,
        fragment,
    )
    assert any(0 <= top < 900 for top in out["tops"]), out["tops"]
    assert out["scrolled"] == [0, 0, 0]


def test_names_stay_text(copied):
    """A module, pass, node or note that is called like markup is shown, and runs nothing."""
    bad = (
        "</script><img src=x onerror=\"document.title='broken'\"><script>document.title=1</script>"
    )
    path = copied / "dump.json"
    data = json.loads(path.read_text())
    data["index"]["notes"] = [bad]
    data["sessions"][0]["model"] = bad
    for row in data["sessions"][0]["modules"]:
        row["kind"] = bad
    for one in data["passes"]:
        one["name"], one["skipped"] = bad, [bad]
    for node in data["graphs"][1]["nodes"]:
        node.update(module=f"model.layers.0 {bad}", line=bad, args=bad)
    path.write_text(json.dumps(data))
    out = drive(
        write_page(copied),
        """
        for (const one of ["model", "graph=1", "pass=1", "kernel", "timeline", "files", "ran"])
          await open_(`#${one}`);
        await search_("onerror");
        out.found = all("#found a").length;
        out.title = document.title;
        out.images = all("img").length;
        out.shown = texts("#ran h1");
        """,
    )
    assert out["title"] == "attn-ops dump"
    assert out["images"] == 0
    assert out["shown"] == [bad]
    assert out["found"]


@pytest.mark.slow
def test_a_page_of_32_layers_is_small_and_quick(make_model, tmp_path):
    """Hidden sizes are small, so that it compiles here; graphs and pages have no weights."""
    model = make_model("llama", num_hidden_layers=32)
    options: Any = {"fast_prefill": "on"}
    compiled: Any = torch.compile(
        model, backend=fx_passes.attn_ops, fullgraph=True, options=options
    )
    session = graphs.DecodeSession(compiled, max_batch_size=2, max_tokens=32)
    with graphs.dump(tmp_path / "dump") as directory:
        session.generate([[1, 2, 3]], 2)
    page = directory / "index.html"
    assert page.stat().st_size < 8_000_000
    assert min(rendered_ms(page) for _ in range(3)) < 2000
    assert [g["num_calls"] for g in block(page)["graphs"]] == [1, 31, 1]
