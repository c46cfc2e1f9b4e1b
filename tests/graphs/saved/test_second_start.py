"""What one session compiled is loaded by the next, or compiled again with the reason."""

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters

from graphs.saved.folder import Entry, Folder, NotSavedError
from tests.kit.models import build_model
from tests.kit.sessions import PROMPTS, make_session, tokens_of

PROCESS = """
    import sys, torch
    from torch._dynamo.utils import counters
    from tests.kit.models import build_model
    from tests.kit.sessions import PROMPTS, make_session, tokens_of
    model = torch.compile(build_model("llama"), backend="attn_ops", fullgraph=True)
    session = make_session(model, compile_cache=sys.argv[1])
    print("tokens", tokens_of(session.generate(PROMPTS, 8)))
    print("traces", len(counters["frames"]), counters["stats"]["unique_graphs"])
    print("recompiles", session.counters.num_recompiles)
    print("outcome", session.report().compile_cache)
"""


def compiled(family="llama", **changes):
    torch._dynamo.reset()
    counters.clear()
    options = changes.pop("options", None)
    model = torch.compile(build_model(family), backend="attn_ops", fullgraph=True, options=options)
    return model, make_session(model, **changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder and the tokens of a session that compiled."""
    folder = tmp_path_factory.mktemp("saved")
    folder.chmod(0o700)
    _, session = compiled(compile_cache=folder)
    tokens = tokens_of(session.generate(PROMPTS, 8))
    assert "; saved in" in session.report().compile_cache
    return folder, tokens


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may change."""
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    copy.chmod(0o700)
    return copy


def outcome(session) -> str:
    """Of its first call, without compiling where nothing is loaded."""
    with pytest.raises(InterruptedError):
        session.warm_up()
    return session.report().compile_cache


@pytest.fixture
def never_compiles(monkeypatch):
    """A model that must be compiled raises instead."""

    def compile_fx(*args, **kwargs):
        raise InterruptedError

    monkeypatch.setattr("graphs.saved.cache.Keeper", compile_fx)


def test_weights_change_in_place(saved, never_compiles) -> None:
    """Values are no part of the key, and are read at every call."""
    model, session = compiled(compile_cache=saved[0])
    plain_model = build_model("llama")
    plain = make_session(plain_model, cudagraph_mode="NONE")
    for changed in (model._orig_mod, plain_model):
        with torch.no_grad():
            changed.lm_head.weight.copy_(changed.lm_head.weight.flip(0))
    assert tokens_of(session.generate(PROMPTS, 8)) == tokens_of(plain.generate(PROMPTS, 8))
    with torch.no_grad():
        for changed in (model._orig_mod, plain_model):
            changed.lm_head.weight.copy_(changed.lm_head.weight.roll(3, 0))
    assert tokens_of(session.generate(PROMPTS, 8)) == tokens_of(plain.generate(PROMPTS, 8))
    assert session.report().compile_cache.startswith("loaded")


@pytest.mark.parametrize(
    ("changes", "section"),
    [
        ({"options": {"collapse_views": False}}, "options of torch.compile"),
        ({"max_tokens": 32}, "batch"),
    ],
)
def test_reason_for_another_key(folder, never_compiles, changes, section) -> None:
    _, session = compiled(compile_cache=folder, **changes)
    assert section in outcome(session)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (
            "graphs.saved.key.own_source",
            lambda: "another version",
            "other than what is: code of attn_ops",
        ),
        (
            "fx_passes.passes.views.CollapseViews.source",
            lambda self: "changed",
            "options of torch.compile",
        ),
        (
            "transformers.models.llama.modeling_llama.rotate_half",
            lambda x: x,
            "other than what is: code of the model",
        ),
        (
            "transformers.masking_utils.find_packed_sequence_indices",
            lambda x: x,
            "masking_utils has changed",
        ),
    ],
)
def test_reason_for_another_source(folder, never_compiles, monkeypatch, name, value, reason):
    """Also where a function was replaced before the session began."""
    monkeypatch.setattr(name, value)
    _, session = compiled(compile_cache=folder)
    assert outcome(session).endswith(reason)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.config, "rms_norm_eps", 0.5),
        lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
        lambda model: model.model.norm.register_forward_hook(lambda m, args, out: out * 2),
        lambda model: setattr(model.model.norm, "forward", lambda hidden: hidden * 2),
    ],
    ids=["config", "attribute", "hook", "forward"],
)
def test_reason_for_another_model(folder, never_compiles, change) -> None:
    torch._dynamo.reset()
    model = build_model("llama")
    change(model)
    session = make_session(torch.compile(model, backend="attn_ops"), compile_cache=folder)
    assert outcome(session).endswith("other than what is: model")


def test_another_backend(folder, never_compiles) -> None:
    session = make_session(torch.compile(build_model("llama"), backend="eager"),
                           compile_cache=folder)  # fmt: skip
    assert "not compiled by torch.compile(model, backend='attn_ops')" in outcome(session)


# -- files -----------------------------------------------------------------------------------------


def only_file(folder):
    (file,) = folder.glob("*.compiled")
    return file


@pytest.fixture
def nothing_unpickled(monkeypatch, never_compiles):
    def loads(*args):
        raise AssertionError("a file that must be refused was unpickled")

    monkeypatch.setattr("graphs.saved.cache.pickle.loads", loads)


def _content(change):
    def damage(folder) -> None:
        file = only_file(folder)
        file.write_bytes(change(file.read_bytes()))

    return damage


def _flipped(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


def _other_layout(folder) -> None:
    with zipfile.ZipFile(only_file(folder), "w") as archive:
        archive.writestr("header.json", "no JSON")


def _link(folder) -> None:
    file, elsewhere = only_file(folder), folder.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_content(lambda content: content[:-10]), "the file is damaged"),
        (_content(_flipped), "the file is damaged"),
        (_other_layout, "the file is damaged or has another format"),
        (_content(lambda _: b"something else\n"), "the file is damaged or has another format"),
        (lambda folder: folder.chmod(0o777), "other users can write"),
        (lambda folder: only_file(folder).chmod(0o666), "other users can write"),
        (_link, "cannot be read"),
    ],
)
def test_refused(folder, nothing_unpickled, change, reason) -> None:
    change(folder)
    _, session = compiled(compile_cache=folder)
    assert reason in outcome(session)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
def test_owner_refused(folder, nothing_unpickled, monkeypatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    _, session = compiled(compile_cache=folder)
    assert "belongs to another user" in outcome(session)


def test_file_under_another_name_refused(folder, nothing_unpickled) -> None:
    """The key stands in the file too."""
    file = only_file(folder)
    found = Folder(folder).read(file.stem)
    Folder(folder).write(file.stem, Entry(found.header | {"key": {"model": "x"}}, found.pieces))
    _, session = compiled(compile_cache=folder)
    assert "the file is of another compilation" in outcome(session)


def test_concurrent_writers(tmp_path) -> None:
    """Every reader sees a whole entry, and no temporary file stays."""
    folder = Folder(tmp_path / "made")
    entries = [Entry({"key": {"n": str(i)}}, [bytes([i]) * 50_000]) for i in range(8)]

    def write_and_read(entry: Entry) -> Entry:
        folder.write("name", entry)
        found = folder.read("name")
        assert found is not None
        return found

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(write_and_read, entries * 4):
            assert found.pieces[0] == bytes([int(found.header["key"]["n"])]) * 50_000
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["name.compiled"]


def test_no_folder_to_write(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotSavedError, match="cannot be written"):
        Folder(tmp_path / "file" / "below").write("name", Entry({}, []))


# -- with compilations -----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes(tmp_path) -> None:
    def run() -> dict[str, str]:
        command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(tmp_path / "cache")]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return dict(line.split(" ", 1) for line in output.splitlines() if " " in line)

    first, second = run(), run()
    assert first["outcome"].startswith("compiled: nothing is saved")
    assert first["traces"].endswith(" 1")
    assert second["outcome"].startswith("loaded from")
    assert second["traces"] == "0 0"
    assert second["tokens"] == first["tokens"]
    assert first["recompiles"] == second["recompiles"] == "0"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_caches_of_another_size(family, tmp_path) -> None:
    """Also where layers with a window have their own number of blocks."""
    tmp_path.chmod(0o700)
    windows = {"max_tokens": 128, "max_tokens_per_step": 16} if family == "gemma2" else {}
    wanted = None
    for number in (512, 1024, 384):
        _, session = compiled(family, compile_cache=tmp_path, cache_tokens=number, **windows)
        tokens = tokens_of(session.generate(PROMPTS, 8))
        assert (session.cache.window_pool is not None) == (family == "gemma2")
        if wanted is None:
            assert "; saved in" in session.report().compile_cache
            wanted = tokens
            continue
        assert tokens == wanted
        report = session.report()
        assert report.compile_cache == f"loaded from {tmp_path}"
        if family == "llama":  # the layers of Gemma differ
            assert report.matches["outline_layers"] > 0  # of the session that compiled
        assert session.counters.num_recompiles == 0
        assert counters["stats"]["unique_graphs"] == 0
