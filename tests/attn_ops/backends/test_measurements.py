"""The file that remembers times: what is believed of it, and how it is written."""

from pathlib import Path

import pytest
import torch

from attn_ops import AttentionSpec, get_backend
from attn_ops import select_backend as select
from attn_ops.backends import measurements, registry
from attn_ops.backends.measure import MeasuredShape, Measurement

TORCH = get_backend("TORCH")
PLAIN = AttentionSpec(4, 2, 16, torch.float32)
TINY: list = [MeasuredShape(2, 1, 8), ([3, 1], [5, 9])]
OPTIONS: dict = {"block_size": 16, "device": "cpu", "measure": True}


@pytest.fixture(autouse=True)
def only_torch(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_BUILT_IN", {"TORCH": "attn_ops.backends.torch_backend"})


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """How often backends were timed; all take 3 us, then 5."""
    calls = []

    def count(backends, *arguments):
        calls.append(arguments)
        return Measurement({b.name: [3.25, 5.5][: len(arguments[-1])] for b in backends}, {})

    monkeypatch.setattr(measurements, "measure", count)
    return calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "another", "entries": {}}',
        '{"format": "attn_ops measurements 1", "entries": {"k": {"times": {}}}}',
        '{"format": "attn_ops measurements 1", "entries": {"k": {"times": 3, "failed": {}}}}',
    ],
)
def test_a_corrupt_file_is_refused_and_stays(tmp_path, counted, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a file that select_backend wrote, got .*times\.json"):
        select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)
    assert path.read_text() == text
    assert not counted


def test_entries_of_another_machine_are_kept_and_not_used(tmp_path, counted):
    """With backends that are not known here."""
    path = tmp_path / "times.json"
    theirs = measurements.measurement_key(
        ["THEIRS"], [PLAIN], 16, torch.device("cpu"), [((1,), (1,))]
    ).replace('"cpu"', '"another GPU"')
    measurements.remember(path, theirs, Measurement({"THEIRS": [1.0]}, {}))
    assert select(PLAIN, shapes=TINY, measurements=path, **OPTIONS).backend is TORCH
    assert len(counted) == 1
    assert measurements.load(path)[theirs].times == {"THEIRS": [1.0]}


def test_saving_keeps_links(tmp_path):
    target, link = tmp_path / "kept" / "times.json", tmp_path / "times.json"
    target.parent.mkdir()
    link.symlink_to(target)
    for shapes in (TINY, TINY[:1]):
        select(PLAIN, shapes=shapes, measurements=link, **OPTIONS)
    assert link.is_symlink()
    assert len(measurements.load(target)) == 2
    assert [file.name for file in target.parent.iterdir()] == ["times.json"]


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match="measurements must be a file that can be written"):
        select(PLAIN, shapes=TINY, measurements=tmp_path / "none" / "times.json", **OPTIONS)
    for path in (tmp_path, 3):
        with pytest.raises(ValueError, match="measurements must be a file that select_backend wr"):
            select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "times.json"
    select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)
    before = path.read_text()

    def replace(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(ValueError, match=r"can be written.*disk full"):
        select(PLAIN, shapes=TINY[:1], measurements=path, **OPTIONS)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]
