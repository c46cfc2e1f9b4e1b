"""The directory of a dump: which ones are taken, and what in them is left alone."""

import pytest
import torch

import graphs
from tests.graphs.dumps.dumped import compiled_function, files


def test_an_earlier_dump_is_replaced(tmp_path):
    with graphs.dump(tmp_path / "dump") as directory:
        compiled_function()(torch.ones(2, 3), torch.ones(3, 2))
    (directory / "mine.txt").write_text("kept")
    with graphs.dump(str(directory)):
        pass
    assert files(directory) == {"index.md", "index.html", "dump.json", "mine.txt"}


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


@pytest.mark.parametrize("index", [b"# mine\n", b"\xff\xfe\x00binary", b"", None])
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
