"""The folder of compiled models: one zip file each, in a folder that only its owner can write.

A file holds pickles, and unpickling runs what they say. So nothing is read from a folder or file
that another user owns or can write. `header.json` holds the key and the plan; pieces are numbered.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIX = ".compiled"
MOST_COMPARED = 32
"""How many files are compared with a key that no file has."""


class NotSavedError(Exception):
    """Why something cannot be written or used, in a line for reports."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The content of a file.

    Attributes:
        header: the key, the plan and the reports of the passes.
        pieces: pickles.
    """

    header: dict[str, Any]
    pieces: list[bytes]


class Folder:
    """Raises NotSavedError where it cannot be used, and no other error.

    Args:
        path: created for its owner alone, if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    def read(self, name: str) -> Entry | None:
        """The entry of that name, or None."""
        if not self.path.exists():
            return None
        self._check_trust()
        return _read(self.path / f"{name}{SUFFIX}")

    def headers(self) -> Iterator[dict[str, Any]]:
        """Headers of the newest files that can be read; for messages only."""
        with contextlib.suppress(OSError):
            files = [(p.stat().st_mtime, p) for p in self.path.glob(f"*{SUFFIX}")]
            for _, path in sorted(files, reverse=True)[:MOST_COMPARED]:
                with contextlib.suppress(NotSavedError):
                    entry = _read(path)
                    if entry is not None:
                        yield entry.header

    def write(self, name: str, entry: Entry) -> None:
        """Replace the entry as a whole: a reader sees the old one or the new one."""
        temporary = self.path / f"{name}.{secrets.token_hex(8)}.tmp"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_trust()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with (
                open(os.open(temporary, flags, 0o600), "wb") as file,
                zipfile.ZipFile(file, "w") as archive,
            ):
                archive.writestr("header.json", json.dumps(entry.header))
                for number, piece in enumerate(entry.pieces):
                    archive.writestr(str(number), piece)
            os.replace(temporary, self.path / f"{name}{SUFFIX}")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise NotSavedError(f"{self.path} cannot be written: {error}") from error

    def _check_trust(self) -> None:
        try:
            _check_owner(os.stat(self.path), self.path)
        except OSError as error:
            raise NotSavedError(f"{self.path} cannot be read: {error}") from error


def _check_owner(found: os.stat_result, path: Path) -> None:
    if not hasattr(os, "geteuid"):
        raise NotSavedError("this system does not say who may write a file")
    if found.st_uid != os.geteuid():
        raise NotSavedError(f"{path} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotSavedError(f"other users can write {path}; chmod go-w removes that")


def _read(path: Path) -> Entry | None:
    """Read a file of ours. The open file is checked, not its name; links are refused."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            _check_owner(os.fstat(file.fileno()), path)
            archive = zipfile.ZipFile(file)
            header, *pieces = map(archive.read, archive.namelist())  # compares checksums
            return Entry(json.loads(header), pieces)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotSavedError(f"{path} cannot be read: {error}") from error
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        raise NotSavedError(f"the file is damaged or has another format: {error}") from error
