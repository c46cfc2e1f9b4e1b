"""Dumps: what is in them, cold and warm, and that sessions do not mind."""

import json
import logging
import re
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import fx_passes
import graphs
from graphs.dumps import dump as dump_module
from graphs.dumps import trace
from graphs.dumps.data import read
from graphs.dumps.folder import MARKER
from tests.graphs.dumps.dumped import block, compiled_function, files

PROMPTS = [[1, 2, 3], list(range(20))]
FOLDERS = {"passes", "final", "inductor", "timeline", "depyf", "trace"}


def compiled_session(model, **options) -> graphs.DecodeSession:
    compiled: Any = torch.compile(
        model, backend=fx_passes.attn_ops, fullgraph=True, options=options
    )
    return graphs.DecodeSession(compiled, max_batch_size=2, max_tokens=32, max_tokens_per_step=8)


def linked(directory) -> set[str]:
    return set(re.findall(r"\]\(([^)]+)\)", (directory / "index.md").read_text()))


def state(session) -> tuple[int, int, int]:
    return tuple(
        getattr(session.counters, name) for name in ("num_graphs", "num_breaks", "num_recompiles")
    )


@pytest.fixture
def expected(make_model):
    model = make_model("llama")
    return graphs.DecodeSession(model, max_batch_size=2, max_tokens=32).generate(PROMPTS, 6)


@pytest.mark.slow
def test_a_session_inside(make_model, expected, tmp_path):
    session = compiled_session(make_model("llama"))
    with graphs.dump(tmp_path / "dump") as directory:
        assert session.generate(PROMPTS, 6) == expected
    assert session.generate(PROMPTS, 6) == expected  # also after depyf's files are complete
    assert state(session) == (1, 0, 0)
    names = files(directory)
    assert linked(directory) == names - {"index.md", "index.html"}  # each listed, none missing
    folders = {name.split("/")[0] for name in names}
    assert folders == {"index.md", "index.html", "dump.json", *FOLDERS}
    index = (directory / "index.md").read_text()
    assert index.startswith(MARKER)
    assert "backend TORCH" in index
    assert "1 graphs, 0 breaks, 0 recompiles" in index
    words = session.compile_record.matches_in_words()
    assert words["outline_layers"] == "2"
    assert words["collapse_views"].endswith(" x 2 layers")
    for name, matches in words.items():
        assert f"- {name} {matches}\n" in index
    assert {p.graph_name for p in session.compile_record.passes} == {
        "whole model", "embedding", "decoder layer", "head",
    }  # fmt: skip
    assert {name.split("-", 1)[1] for name in names if name.startswith("final/")} == {
        "embedding.py", "decoder_layer.py", "head.py",
    }  # fmt: skip
    assert any("full_code_for" in name for name in names)
    html = (directory / "index.html").read_text()
    assert all(name in html for name in linked(directory))
    check_passes(directory, session)
    texts = [(directory / n).read_text() for n in names if n.startswith("inductor/")]
    assert any("def call(" in text or "class Runner" in text for text in texts)
    assert any("torch.ops.attn_ops.attention" in text for text in texts)


def check_passes(directory, session) -> None:
    """Before and after differ, are numbered in order, and the final graphs are the last of them."""
    records = session.compile_record.passes
    before = sorted(p for p in (directory / "passes").iterdir() if "before" in p.name)
    assert before
    for path in before:
        number, name, _ = path.name.split("-", 2)
        assert records[int(number) - 1].pass_name == name
        after = path.with_name(path.name.replace(".before.", ".after."))
        assert after.read_text() != path.read_text()
    index = (directory / "index.md").read_text()
    for i, record in enumerate(records, 1):
        wrote = any(p.name.startswith(f"{i:02d}-") for p in before)
        assert wrote == (record.matches > 0), "a changed graph has matches"
        line = next(line for line in index.splitlines() if line.startswith(f"{i}. "))
        assert f"`{record.pass_name}`" in line
        assert ("the graph stayed as it was" in line) == (not wrote)
    final = sorted(p.read_text() for p in (directory / "final").iterdir())
    assert len(final) == len(session.compile_record.final_graphs)
    assert sum("attn_ops.attention" in text for text in final) >= 1


@pytest.mark.slow
def test_a_session_compiled_before(make_model, expected, tmp_path):
    """It compiles once more inside, once, and the session's numbers stay."""
    session = compiled_session(make_model("llama"))
    session.generate(PROMPTS, 6)
    before = state(session), len(session.compile_record.passes)
    made = counters["stats"]["unique_graphs"]
    with graphs.dump(tmp_path) as directory:
        assert session.generate(PROMPTS, 6) == expected
        assert session.generate(PROMPTS, 6) == expected
    assert counters["stats"]["unique_graphs"] == made + 1
    assert session.generate(PROMPTS, 6) == expected
    assert (state(session), len(session.compile_record.passes)) == before
    check_passes(directory, session)
    assert list((directory / "inductor").iterdir())


def test_an_uncompiled_session(make_model, expected, tmp_path):
    session = graphs.DecodeSession(make_model("llama"), max_batch_size=2, max_tokens=32)
    with graphs.dump(tmp_path) as directory:
        assert session.generate(PROMPTS, 6) == expected
    assert files(directory) == {"index.md", "index.html", "dump.json"}
    assert "Nothing was compiled inside" in (directory / "index.md").read_text()


def test_a_warm_cache_of_autograd(tmp_path):
    """Plain Inductor takes a whole graph from it, by which no pass runs, but in a dump."""
    function = compiled_function(options=fx_passes.options())
    inputs = torch.randn(3, 4), torch.randn(4, 5)
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            with graphs.dump(tmp_path) as directory:
                function(*inputs)
    index = (directory / "index.md").read_text()
    assert "no pass ran" not in index
    assert "- share_products 0: no equal products\n" in index
    assert (directory / "final" / "01-whole_graph.py").is_file()


def test_a_warm_cache(tmp_path):
    """Inductor's cache hits, and the dump holds what it held when it missed."""
    inputs = torch.randn(3, 4), torch.randn(4, 5)
    seen = []
    with fresh_cache():
        for name in ("cold", "warm"):
            torch._dynamo.reset()
            counters.clear()
            with graphs.dump(tmp_path / name) as directory:
                compiled_function()(*inputs)
            hits = counters["inductor"]["fxgraph_cache_hit"]
            assert hits == (name == "warm")
            ours = {n for n in files(directory) if not n.startswith("depyf/")}
            seen.append({n: (directory / n).read_text() for n in ours if not n.startswith("index")})
            seen[-1][trace.FILE] = trace.origins(seen[-1][trace.FILE])  # the rest has times
            data = json.loads(seen[-1].pop("dump.json"))
            entries = data["index"].pop("entries")
            assert len(data["index"].pop("compiled")) == 1
            data["entries"] = [one for one in entries if one["section"] != "depyf"]
            seen[-1]["data"] = data
            index = (directory / "index.md").read_text()
            assert "- share_products 0: no equal products\n" in index
    cold, warm = seen
    assert any(name.startswith("inductor/") for name in warm)
    assert cold == warm


def test_skip_reasons_are_listed(tmp_path):
    class Reluctant(fx_passes.Pass):
        """Matches nothing and says why."""

        name = "reluctant"
        stage = "aten"

        def apply(self, graph):
            self.skip("it is [not]\nworth it")
            return 0

    fx_passes.register_pass(Reluctant)
    try:
        with graphs.dump(tmp_path) as directory:
            compiled_function()(torch.ones(2, 3), torch.ones(3, 2))
    finally:
        fx_passes.unregister_pass("reluctant")
    index = (directory / "index.md").read_text()
    assert "left alone: it is [not] worth it" in index
    assert "reluctant 0: it is [not]" in index
    entries = block(directory / "index.html")["index"]["entries"]
    assert ["it is [not] worth it"] in [one["skipped"] for one in entries]


@pytest.mark.slow
def test_fast_prefill_is_shown(make_model, expected, tmp_path):
    """What it gathers is drawn, and what it saves is in the index and in the session's report."""
    session = compiled_session(make_model("llama"), fast_prefill="on")
    with graphs.dump(tmp_path) as directory:
        assert session.generate(PROMPTS, 6) == expected
    line = (
        "computes 5 of 14 products and 1 of 2 attentions for logits rows only; "
        "saves 53,248 FLOP and 5,800 bytes a dead row"
    )
    assert session.report().passes == {"fast_prefill": line}
    assert line in re.sub(r"\s+", " ", str(session.report()))
    assert f"Fast prefill: {line}." in (directory / "index.md").read_text()
    data = block(directory / "index.html")
    assert data["index"]["summaries"] == {"fast_prefill": line}
    (one,) = (found for found in data["passes"] if found["name"] == "fast_prefill")
    kinds = {tuple(kind["after"]): kind["drawn"] for kind in one["places"]}
    gathered = [node for pair in kinds[("index_select",)] for node in pair["after"] if node["own"]]
    assert {node["op"] for node in gathered} == {"index_select"}


@pytest.mark.parametrize("switch", ["off", "auto"])
def test_fast_prefill_does_nothing(tmp_path, switch):
    compiled = torch.compile(
        lambda x, w: torch.relu(x @ w),
        backend=fx_passes.attn_ops,
        dynamic=True,
        options={"fast_prefill": switch},
    )
    with graphs.dump(tmp_path) as directory:
        compiled(torch.ones(3, 4), torch.ones(4, 5))
    index = (directory / "index.md").read_text()
    line = "Fast prefill: nothing is dropped: no rows are selected by a tensor of indices"
    assert (line in index) == (switch == "auto")
    assert ("Fast prefill" in index) == (switch == "auto")


def test_a_broken_package_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_module, "broken_passes", lambda: {"theirs": "ImportError: gone"})
    with graphs.dump(tmp_path):
        pass
    assert (
        "> The installed pass theirs is left out: ImportError: gone."
        in (tmp_path / "index.md").read_text()
    )


def test_an_error_inside_leaves_what_was_recorded(tmp_path):
    with pytest.raises(ZeroDivisionError), graphs.dump(tmp_path):
        compiled_function()(torch.ones(2, 3), torch.ones(3, 2)).tolist().index(1 / 0)
    assert "The block ended with ZeroDivisionError" in (tmp_path / "index.md").read_text()
    assert list((tmp_path / "inductor").iterdir())
    with graphs.dump(tmp_path):
        pass


def test_what_was_compiled_without_a_session_and_why_again(tmp_path):
    function = compiled_function(backend="inductor")
    with graphs.dump(tmp_path) as directory:
        for dtype in (torch.float32, torch.float64):
            function(torch.ones(2, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype))
    first, again = block(directory / "index.html")["compiled"]
    assert first["function"] == again["function"] == "<lambda>"
    assert first["place"].rpartition(":")[0].endswith("dumped.py")
    assert (first["why"], first["failed"], again["failed"]) == ("", "", "")
    assert again["why"].endswith("dtype mismatch. expected Float, actual Double")
    assert min(first["seconds"], again["seconds"]) > 0
    index = (directory / "index.md").read_text()
    assert "Graphs that Dynamo handed to the backend: 2." in index
    assert f"s, again as {again['why']}\n" in index
    assert "> No pass of attn_ops ran: torch.compile runs them with backend='attn_ops'" in index


def test_a_compilation_that_fails_is_listed(tmp_path):
    def broken(gm, inputs):
        raise ArithmeticError("no such sum")

    function = compiled_function(backend=broken)
    with pytest.raises(BackendCompilerFailed), graphs.dump(tmp_path) as directory:
        function(torch.ones(2, 3), torch.ones(3, 2))
    (one,) = block(directory / "index.html")["compiled"]
    assert "no such sum" in one["failed"]
    assert "which failed: " in (directory / "index.md").read_text()


def test_a_function_that_is_profiled(tmp_path):
    """It is compiled inside, and its operators are the timeline."""
    function, calls = compiled_function(), []

    def step():
        calls.append(function(torch.ones(2, 3), torch.ones(3, 2)).sort())

    with graphs.dump(tmp_path, profile=step) as directory:
        pass
    assert len(calls) == 4
    data = block(directory / "index.html")
    timeline = data["timeline"]
    assert (data["timeline_why"], timeline["kind"], timeline["device"]) == ("", "profile", "cpu")
    assert [one["function"] for one in data["compiled"]] == ["<lambda>"]
    assert {"aten::mm", "aten::sort"} <= set(timeline["names"])
    product = timeline["calls"][[one["names"] for one in timeline["calls"]].index(["aten::mm"])]
    assert data["kernels"][product["graph"]]["calls"][product["call"]]["name"].endswith("mm")
    assert product["bytes"] == 4 * (2 * 3 + 3 * 2 + 2 * 2)
    assert timeline["sum_us"] == pytest.approx(sum(row[1] for row in timeline["rows"]), abs=0.01)
    assert timeline["trace"] in (directory / "index.md").read_text()


def test_what_cannot_be_profiled(tmp_path):
    with (
        pytest.raises(ValueError, match="profile must be None or callable without arguments, got"),
        graphs.dump(tmp_path / "dump", profile=7),  # pyright: ignore
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), graphs.dump(tmp_path, profile=lambda: 1 / 0):
        pass
    assert "The block ended with ZeroDivisionError" in (tmp_path / "index.md").read_text()
    assert json.loads((tmp_path / "dump.json").read_text())["timeline"] is None
    with graphs.dump(tmp_path, profile=lambda: None):
        pass
    assert json.loads((tmp_path / "dump.json").read_text())["timeline_why"] == (
        "the profiler saw no kernel"
    )


def fails(*args):
    raise RuntimeError("no\nroom")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nodes_of", "nodes of a graph"),
        ("layout_entries", "pictures of layouts"),
        ("write_page", "page"),
    ],
)
def test_a_part_that_fails_is_left_out(tmp_path, monkeypatch, caplog, name, what):
    """A warning and a note; the rest is written."""
    monkeypatch.setattr(dump_module, name, fails)
    with caplog.at_level(logging.WARNING), graphs.dump(tmp_path) as directory:
        result = compiled_function()(torch.ones(2, 3), torch.ones(3, 4))
    assert torch.equal(result, torch.full((2, 4), 3.0))
    note = f"left out of the dump: {what}: RuntimeError: no room"
    assert note in caplog.text
    assert (note in read(directory)["index"]["notes"]) == (name != "write_page")
    found = {name.split("/")[0] for name in files(directory)}
    assert found >= {"final", "inductor", "index.md", "dump.json"}
    assert ("index.html" in found) == (name != "write_page")
