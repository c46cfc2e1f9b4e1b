"""A part of a dump that fails: a warning, a note, and everything else is there."""

import logging

import pytest
import torch

import fx_passes.pictures.nodes
import fx_passes.pictures.picture
import graphs
from graphs.dumps import dump as dump_module
from graphs.dumps.data import read
from tests.graphs.dumps.dumped import compiled_function, files


def fails(*args):
    raise RuntimeError("no\nroom")


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [
        (fx_passes.pictures.nodes, "nodes_of", "nodes of a graph"),
        (fx_passes.pictures.picture, "draw", "picture of a graph"),
        (dump_module, "layout_entries", "pictures of layouts"),
        (dump_module, "kernels_of", "kernels"),
    ],
)
def test_the_rest_is_written(tmp_path, monkeypatch, caplog, module, name, what):
    monkeypatch.setattr(module, name, fails)
    with caplog.at_level(logging.WARNING), graphs.dump(tmp_path) as directory:
        result = compiled_function()(torch.ones(2, 3), torch.ones(3, 4))
    assert torch.equal(result, torch.full((2, 4), 3.0))
    note = f"left out of the dump: {what}: RuntimeError: no room"
    assert note in caplog.text
    assert note in read(directory)["index"]["notes"]
    assert {name.split("/")[0] for name in files(directory)} >= {"final", "inductor", "index.html"}


def test_the_raw_files_stay_where_the_page_fails(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dump_module, "write_page", fails)
    with caplog.at_level(logging.WARNING), graphs.dump(tmp_path):
        pass
    assert "left out of the dump: page: RuntimeError: no room" in caplog.text
    assert files(tmp_path) == {"index.md", "dump.json"}
