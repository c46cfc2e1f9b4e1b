"""The directory of a dump: an empty one or an earlier dump, never through symbolic links."""

import os
import shutil
from pathlib import Path

from graphs.dumps.index import MARKER


class LinkError(ValueError):
    """Something would be written through a symbolic link."""


FOLDERS = ("passes", "pictures", "final", "inductor", "timeline", "depyf", "trace")
FILES = ("index.md", "index.html", "dump.json")


def check_room(directory: str | os.PathLike[str]) -> Path:
    """The directory, unless something in it is not ours; nothing is written.

    Raises:
        TypeError: `directory` is no path.
        ValueError: it is a file, holds something that is not a dump, links lead out of it, or its
            name holds a NUL.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory must be a path, got {directory!r}")
    if "\0" in os.fsdecode(directory):
        raise ValueError(f"directory must be a path without NUL, got {directory!r}")
    path = Path(os.fsdecode(directory)).absolute()
    for part in (*reversed(path.parents), path):
        if os.path.lexists(part) and not part.is_dir():
            raise ValueError(f"directory must be a directory, got the file {part}")
    if path.is_dir():
        _check_earlier(path)
    return path


def make_room(directory: str | os.PathLike[str]) -> Path:
    """Remove an earlier dump, and leave an index that marks the directory as ours.

    Raises:
        TypeError, ValueError: as `check_room`.
    """
    path = check_room(directory)
    path.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        if (path / name).exists():
            shutil.rmtree(path / name)
    for name in FILES:
        (path / name).unlink(missing_ok=True)
    put(path, "index.md", f"{MARKER}\nThis dump is still being written.\n")
    return path


def put(directory: Path, name: str, text: str) -> str:
    """Write a file of the dump; its name.

    Raises:
        LinkError: something in its path is a symbolic link.
    """
    path = directory / name
    for part in (path, path.parent):
        if part != directory:
            _check_link(part)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    return name


def _check_earlier(path: Path) -> None:
    others = sorted(entry.name for entry in path.iterdir())
    if not others:
        return
    for name in (*FOLDERS, *FILES):
        _check_link(path / name)
    if not is_dump(path):
        other = "index.md" if "index.md" in others else others[0]
        raise ValueError(
            f"directory must be new, empty or an earlier dump, got {path} with other files: {other}"
        )
    for names, is_right, kind in ((FOLDERS, Path.is_dir, "folder"), (FILES, Path.is_file, "file")):
        for name in names:
            if (path / name).exists() and not is_right(path / name):
                raise ValueError(f"{name} of an earlier dump must be a {kind}, got {path / name}")


def is_dump(directory: Path) -> bool:
    """Whether its index begins as a dump's does, whatever the bytes are."""
    path = directory / "index.md"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MARKER)) == MARKER.encode()


def _check_link(path: Path) -> None:
    if path.is_symlink():
        raise LinkError(
            f"directory must hold no symbolic link where a dump writes, got {path} "
            f"to {os.readlink(path)}"
        )
