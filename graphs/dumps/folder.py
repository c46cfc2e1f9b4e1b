"""The directory of a dump: a new or empty one, or an earlier dump."""

import os
import shutil
from pathlib import Path

MARKER = "<!-- attn-ops dump -->"
"""First line of index.md; a directory that has it may be replaced by a new dump."""

FOLDERS = ("passes", "pictures", "final", "inductor", "timeline", "depyf", "trace")
FILES = ("index.md", "index.html", "dump.json")


def check_room(directory: str | os.PathLike[str]) -> Path:
    """The directory, unless it holds files that are not ours; nothing is written.

    Raises:
        TypeError: `directory` is no path.
        ValueError: it is a file, or holds something that is not a dump.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory must be a path, got {directory!r}")
    path = Path(os.fsdecode(directory)).absolute()
    for part in (*reversed(path.parents), path):
        if os.path.lexists(part) and not part.is_dir():
            raise ValueError(f"directory must be a directory, got the file {part}")
    others = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if others and not is_dump(path):
        raise ValueError(
            "directory must be new, empty or an earlier dump, "
            f"got {path} with other files: {others[0]}"
        )
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
    """Write a file of the dump; returns its name."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    return name


def is_dump(directory: Path) -> bool:
    """Whether the directory's index begins as that of a dump."""
    path = directory / "index.md"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MARKER)) == MARKER.encode()
