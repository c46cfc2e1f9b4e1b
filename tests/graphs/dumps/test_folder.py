"""The directory of a dump: which ones are taken, and what in them is left alone."""

import shutil

import pytest
import torch

import graphs
from graphs.dumps.folder import put
from graphs.dumps.index import MARKER
from tests.graphs.dumps.dumped import compiled_function, files


def test_an_earlier_dump_is_replaced(tmp_path):
    with graphs.dump(tmp_path / "dump") as directory:
        compiled_function()(torch.ones(2, 3), torch.ones(3, 2))
    (directory / "mine.txt").write_text("kept")
    with graphs.dump(str(directory)):
        pass
    assert files(directory) == {"index.md", "index.html", "dump.json", "mine.txt"}


def test_other_directories_are_refused(tmp_path):
    (tmp_path / "index.md").write_text("# mine\n")
    with pytest.raises(ValueError, match=r"^directory must be new, empty or an earlier dump"):
        graphs.dump(tmp_path).__enter__()
    with pytest.raises(ValueError, match=r"^directory must be a directory, got the file"):
        graphs.dump(tmp_path / "index.md").__enter__()
    assert files(tmp_path) == {"index.md"}
    assert (tmp_path / "index.md").read_text() == "# mine\n"


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for path, wrong in (("file", "file"), ("file/dump", "file"), ("nowhere", "nowhere")):
        with pytest.raises(
            ValueError, match=f"^directory must be a directory, got the file {tmp_path / wrong}$"
        ):
            graphs.dump(tmp_path / path).__enter__()
    with pytest.raises(TypeError, match=r"^directory must be a path, got 5$"):
        graphs.dump(5).__enter__()
    with pytest.raises(
        ValueError, match=r"^directory must be a path without NUL, got '.*a\\x00b'$"
    ):
        graphs.dump(f"{tmp_path}/a\0b").__enter__()


@pytest.mark.parametrize("index", [b"\xff\xfe\x00binary", b"", None])
def test_what_no_dump_has_made_is_refused(tmp_path, index):
    if index is not None:
        (tmp_path / "index.md").write_bytes(index)
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "mine.py").write_text("mine")
    named = "passes" if index is None else "index.md"
    with pytest.raises(
        ValueError, match=f"^directory must be new, empty .* {tmp_path} with other files: {named}$"
    ):
        graphs.dump(tmp_path).__enter__()
    assert (tmp_path / "passes" / "mine.py").read_text() == "mine"


LINK = r"^directory must hold no symbolic link where a dump writes, got .*{} to /"


@pytest.mark.parametrize("name", ["passes", "depyf", "index.md", "index.html"])
def test_nothing_is_written_through_symbolic_links(tmp_path, name):
    directory, outside = tmp_path / "dump", tmp_path / "outside"
    with graphs.dump(directory):
        pass
    if "." in name:
        outside.write_text(MARKER)
        (directory / name).unlink()
    else:
        outside.mkdir()
        (outside / "mine.py").write_text("mine")
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / name).symlink_to(outside)
    with pytest.raises(ValueError, match=LINK.format(name)):
        graphs.dump(directory).__enter__()
    ours = [outside] if outside.is_file() else [*outside.iterdir()]
    assert [p.read_text() for p in ours] == [MARKER if "." in name else "mine"]


def test_a_link_that_is_made_inside_is_seen(tmp_path):
    outside, directory = tmp_path / "outside", tmp_path / "dump"
    outside.mkdir()
    block = graphs.dump(directory)
    block.__enter__()
    for name in ("passes", "index.html"):
        (directory / name).symlink_to(outside / ("mine" * ("." in name)))
    with pytest.raises(ValueError, match=LINK.format("passes")):
        put(directory, "passes/01.py", "text")
    with pytest.raises(ValueError, match=LINK.format("index.html")):
        block.__exit__(None, None, None)
    assert list(outside.iterdir()) == []


def test_a_part_of_another_kind_is_refused(tmp_path):
    with graphs.dump(tmp_path):
        pass
    (tmp_path / "passes").write_text("mine")
    with pytest.raises(ValueError, match=r"^passes of an earlier dump must be a folder, got /"):
        graphs.dump(tmp_path).__enter__()
    assert (tmp_path / "passes").read_text() == "mine"
