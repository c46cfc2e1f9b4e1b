"""Two dumps side by side."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import graphs
from graphs.app.cli import app
from graphs.dumps.compare import compare
from tests.graphs.dumps.dumped import compiled_function
from tests.graphs.dumps.test_assigned import TIMELINE


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    with graphs.dump(tmp_path_factory.mktemp("compare") / "a") as directory:
        compiled_function()(torch.ones(2, 3), torch.ones(3, 2))
    return directory


@pytest.fixture
def pair(dumped, tmp_path):
    return [shutil.copytree(dumped, tmp_path / name) for name in "ab"]


def change(directory, timeline=None, **changes):
    path = directory / "dump.json"
    data = json.loads(path.read_text())
    data.update(changes)
    if timeline is not None:
        rows = [{"name": n, "start_us": t, "us": us} for n, t, us in timeline]
        busy = sum(us for _, _, us in timeline)
        times = {"sum_us": busy, "gap_us": 0.0, "span_us": busy, "replay_us": busy}
        data["timeline"] = {**TIMELINE, **times, "kernels": rows}
    path.write_text(json.dumps(data))
    return data


def test_equal_dumps(pair):
    assert compare(*pair) == {}
    result = CliRunner().invoke(app, ["compare", *map(str, pair)])
    assert (result.exit_code, result.output.strip()) == (0, "The dumps say the same.")


def test_what_got_slower_comes_first(pair):
    change(pair[0], [("mm", 0, 10.0), ("attention", 10, 5.0), ("gone", 15, 1.0)])
    change(pair[1], [("mm", 0, 9.0), ("attention", 9, 8.0), ("new", 17, 0.5)])
    rows = compare(*pair)["timeline"]
    assert [(row[0], row[3]) for row in rows] == [
        ("a step, measured", "+1.5 us, +9 %"),
        ("all kernels", "+1.5 us, +9 %"),
        ("gaps", ""),
        ("group attention", "+3.0 us, +60 %"),
        ("group other", "-0.5 us, -50 %"),
        ("group products", "-1.0 us, -10 %"),
        ("attention", "+3.0 us, +60 %"),
        ("new", "new"),
        ("mm", "-1.0 us, -10 %"),
        ("gone", "gone"),
    ]
    result = CliRunner().invoke(app, ["compare", *map(str, pair), "--json"])
    assert json.loads(result.output)["timeline"][3][0] == "group attention"


def test_passes_graphs_and_memory(pair):
    data = change(pair[0])
    data["passes"][0]["in_words"] = "7"
    data["graphs"][0]["num_calls"] = 3
    change(pair[1], passes=data["passes"], graphs=data["graphs"], torch="1.0")
    found = compare(*pair)
    name, graph = data["passes"][0]["name"], data["graphs"][0]["name"]
    assert found["passes"][0][0].startswith(name)
    assert found["passes"][0][2] == "7"
    assert found["graphs"] == [(f"{graph}: calls", "1", "3", "+2")]
    assert found["what ran"] == [("torch", torch.__version__, "1.0", "")]
    assert "timeline" not in found


def test_another_folder_is_refused(pair, tmp_path):
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["compare", str(pair[0]), str(tmp_path / "empty")])
    assert result.exit_code == 2
    assert "error: directory must be a dump, got " in result.output
