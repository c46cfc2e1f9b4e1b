"""The file that remembers times: what is believed of it, and how it is written."""

import json
import os
import re

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
        "{",
        "[]",
        "{}",
        '{"format": "another", "entries": {}}',
        '{"format": "attn_ops measurements 1", "entries": {"k": {"times": {}, "failed": {}}}}',
        '{"format": "attn_ops measurements 1", "entries": {"k": {"times": {"A": [-1]}}}}',
    ],
)
def test_a_corrupt_file_is_refused_and_stays(tmp_path, counted, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"measurements must be a file that select_backend wrote"):
        select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)
    assert path.read_text() == text
    assert not counted


def changed_times(value):
    """An entry's times as `value`, a JSON text, where a number stood."""
    return lambda text, number: text.replace(number, value, 1)


WRONG_ENTRIES = {
    "NaN": (changed_times("NaN"), "times of TORCH in entry .* positive finite numbers.*nan"),
    "infinity": (changed_times("Infinity"), "positive finite numbers.*inf"),
    "a huge integer": (changed_times("1" + 400 * "0"), "positive finite numbers"),
    "an integer too long to read": (changed_times("1" + 5000 * "0"), "ValueError: .*4300"),
    "true": (changed_times("true"), "positive finite numbers.*True"),
    "text": (changed_times('"5"'), "positive finite numbers.*'5'"),
    "null": (changed_times("null"), "positive finite numbers.*None"),
    "deep": (changed_times(100_000 * "["), "RecursionError|JSONDecodeError"),
    "two times": (changed_times("3, 4"), "2 positive finite numbers, one a shape"),
    "another backend": (
        lambda text, number: text.replace('"times": {\n    "TORCH"', '"times": {"FLASH_ATTN"'),
        "backends of entry .* must be .'TORCH'., got .'FLASH_ATTN'.",
    ),
    "an unknown backend": (
        lambda text, number: text.replace('"failed": {}', '"failed": {"NOBODY": "broken"}'),
        "backends of entry .* must be .'TORCH'., got .'NOBODY', 'TORCH'.",
    ),
    "no reason": (
        lambda text, number: text.replace('"times": {', '"times": {}, "failed": {').replace(
            ',\n   "failed": {}', ""
        ),
        "times of entry",
    ),
    "half of it": (lambda text, number: text[: len(text) // 2], "JSONDecodeError"),
    "a key of another kind": (
        lambda text, number: text.replace("block_size", "blocks"),
        "entry .* must be named by a JSON object of device, versions, candidates",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_ENTRIES)
def test_a_file_is_checked_before_it_is_believed(tmp_path, counted, wrong):
    """The error names the file, the entry and what belongs there."""
    path = tmp_path / "times.json"
    select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)
    text = path.read_text()
    (entry,) = json.loads(text)["entries"].values()
    change, wanted = WRONG_ENTRIES[wrong]
    path.write_text(change(text, repr(entry["times"]["TORCH"][0])))
    assert path.read_text() != text
    with pytest.raises(ValueError, match=r"times\.json.*supported: ") as error:
        select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)
    assert re.search(wanted, str(error.value)), error.value
    assert len(counted) == 1


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


def test_saving_keeps_links_and_modes(tmp_path):
    target, link = tmp_path / "kept" / "times.json", tmp_path / "times.json"
    target.parent.mkdir()
    link.symlink_to(target)
    select(PLAIN, shapes=TINY, measurements=link, **OPTIONS)
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask
    target.chmod(0o640)
    select(PLAIN, shapes=TINY[:1], measurements=link, **OPTIONS)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert len(measurements.load(target)) == 2
    assert [file.name for file in target.parent.iterdir()] == ["times.json"]


def test_what_is_no_file(tmp_path):
    """A pipe is not waited for; a link to itself is not replaced; bytes are not text."""
    pipe, loop, binary = tmp_path / "pipe", tmp_path / "loop", tmp_path / "binary"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    binary.write_bytes(bytes(range(256)))
    for path in (pipe, loop, binary, "a\0b"):
        with pytest.raises(ValueError, match="must be a file that select_backend wrote, got"):
            select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)
    with pytest.raises(ValueError, match="measurements must be a path, got 3; supported"):
        select(PLAIN, shapes=TINY, measurements=3, **OPTIONS)


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match="measurements must be a file that can be written"):
        select(PLAIN, shapes=TINY, measurements=tmp_path / "none" / "times.json", **OPTIONS)
    with pytest.raises(ValueError, match="measurements must be a file that select_backend wrote"):
        select(PLAIN, shapes=TINY, measurements=tmp_path, **OPTIONS)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "times.json"
    select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)
    before = path.read_text()

    def replace(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(measurements.os, "replace", replace)
    with pytest.raises(ValueError, match=r"can be written.*disk full"):
        select(PLAIN, shapes=TINY[:1], measurements=path, **OPTIONS)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]
