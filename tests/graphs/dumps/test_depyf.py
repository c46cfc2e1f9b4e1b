"""depyf's part of a dump: without it, where it fails, and that it stays in its folder."""

import linecache
import re
import sys
from types import FunctionType

import pytest
import torch
from torch._dynamo.utils import lazy_format_graph_code

import graphs
from graphs.dumps import depyf
from tests.graphs.dumps.dumped import compiled_function, files


def test_without_depyf(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "depyf", None)
    with graphs.dump(tmp_path) as directory:
        compiled_function()(torch.ones(2, 3), torch.ones(3, 2))
    assert "depyf is not installed" in (directory / "index.md").read_text()
    assert {name.split("/")[0] for name in files(directory)} >= {"final", "inductor"}
    assert not (directory / "depyf").exists()


@pytest.mark.parametrize(
    "name",
    ["patched__exec_with_source", "patched_load_by_key_path", "DebuggableHook", "dump_src"],
)
def test_depyf_fails_inside(tmp_path, monkeypatch, name):
    """Whatever depyf raises, the function is compiled and the rest is written."""
    explain = pytest.importorskip("depyf.explain")
    enable_debugging = sys.modules["depyf.explain.enable_debugging"]

    def fail(*args, **kwargs):
        raise RuntimeError("depyf is broken")

    if name == "DebuggableHook":
        monkeypatch.setattr(enable_debugging.DebuggableHook, "__call__", fail)
    else:
        monkeypatch.setattr(explain if name == "dump_src" else enable_debugging, name, fail)
    with graphs.dump(tmp_path) as directory:
        out = compiled_function()(torch.ones(2, 3), torch.ones(3, 2))
    assert torch.equal(out, torch.full((2, 2), 3.0))
    index = (directory / "index.md").read_text()
    assert re.search(r"> depyf .*RuntimeError: depyf is broken", index)
    assert {name.split("/")[0] for name in files(directory)} >= {"final", "inductor"}
    with graphs.dump(tmp_path / "next") as following:  # nothing of it stays behind
        pass
    assert not re.search("depyf .* nest", (following / "index.md").read_text())


def test_everything_depyf_changes_is_put_back(tmp_path):
    import torch._dynamo.utils as dynamo_utils
    from torch._inductor.codecache import PyCodeCache

    def changed():
        return (
            torch.fx.graph_module._exec_with_source,
            PyCodeCache.load_by_key_path,
            dynamo_utils.lazy_format_graph_code.__code__,
        )

    before = changed()
    with graphs.dump(tmp_path / "outer"), graphs.dump(tmp_path / "inner"):
        compiled_function()(torch.ones(2, 3), torch.ones(3, 2))
    assert changed() == before
    assert "blocks of it do not nest" in (tmp_path / "inner" / "index.md").read_text()
    for name in ("outer", "inner"):
        assert list((tmp_path / name / "inductor").iterdir())
    assert list((tmp_path / "outer" / "depyf").iterdir())


def test_depyf_writes_into_the_dump_alone(tmp_path, monkeypatch):
    """A graph may be made by code that is no file, named after a path: by torch, or before."""
    monkeypatch.chdir(tmp_path)
    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    forward = type(gm).forward
    name = "<eval_with_key>.0 from folder/model.py:3 in forward"
    monkeypatch.setitem(linecache.cache, name, (1, None, ["pass\n"], name))
    monkeypatch.setattr(forward, "__code__", forward.__code__.replace(co_filename=name))
    said = []

    def backend(graph, inputs):
        said.append(str(lazy_format_graph_code("of a path", gm)))
        said.append(str(lazy_format_graph_code("of a graph", graph)))
        return graph

    with graphs.dump(tmp_path / "in" / ".." / "dump") as directory:
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3))
    assert ["sin()" in text for text in said] == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "in"]
    names = [path.name.split(".")[1] for path in (directory / "depyf").glob("*of_a*.py")]
    assert names == ["of_a_graph"]
    assert "depyf left" not in (directory / "index.md").read_text()


def test_the_swapped_code_finds_all_it_needs_by_itself(monkeypatch):
    """It runs with torch's globals; those of torch 2.11 have no `Any`."""
    monkeypatch.setitem(depyf._block, "torchs", lambda name, gm, *rest, **more: f"torch's {name}")
    gm = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    monkeypatch.setitem(depyf._block, "directory", None)
    monkeypatch.setitem(depyf._block, "notes", [])
    swapped = FunctionType(depyf._format_graph.__code__, {"__builtins__": __builtins__})
    assert swapped("graph", gm, None) == "torch's graph"
    assert depyf._block["notes"] == []
