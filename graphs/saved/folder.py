"""Files of compiled models: one each, in a folder that only its owner can write.

A file holds pickles, and unpickling runs what they say. So nothing is read from a folder or file
that another user owns or can write. Layout: a line with `FORMAT`, a line with the SHA-256 of the
rest, a line of JSON with the key and the plan, the pieces.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphs.saved.plan import NotSavedError

FORMAT = b"attn_ops compiled 1"
SUFFIX = ".compiled"
LONGEST_LISTED = 32
"""Files whose keys are compared with a key that no file has."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a file holds.

    Attributes:
        header: the key, the plan and what else is data.
        pieces: pickles.
    """

    header: dict[str, Any]
    pieces: list[bytes]


class Folder:
    """Raises NotSavedError where it cannot be used; other errors are never raised.

    Args:
        path: made if there is none, for its owner alone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    def read(self, name: str) -> Entry | None:
        """The entry of that name; None: there is none."""
        if not self.path.exists():
            return None
        self._check_trust()
        content = _content(self.path / f"{name}{SUFFIX}")
        return None if content is None else _entry(content)

    def headers(self) -> Iterator[dict[str, Any]]:
        """Those of the newest files that can be read; for messages only."""
        with contextlib.suppress(OSError):
            files = [(p.stat().st_mtime, p) for p in self.path.glob(f"*{SUFFIX}")]
            for _, path in sorted(files, reverse=True)[:LONGEST_LISTED]:
                with contextlib.suppress(NotSavedError):
                    content = _content(path)
                    if content is not None:
                        yield _entry(content).header

    def write(self, name: str, entry: Entry) -> None:
        """Replace the entry as a whole: a reader sees the old one or the new one."""
        header = entry.header | {"lengths": list(map(len, entry.pieces))}
        body = b"\n".join([json.dumps(header).encode(), b"".join(entry.pieces)])
        content = b"\n".join([FORMAT, hashlib.sha256(body).hexdigest().encode(), body])
        temporary = self.path / f"{name}.{secrets.token_hex(8)}.tmp"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_trust()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(content)
            os.replace(temporary, self.path / f"{name}{SUFFIX}")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise NotSavedError(f"{self.path} cannot be written: {error}") from error

    def _check_trust(self) -> None:
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise NotSavedError(f"{self.path} cannot be read: {error}") from error
        if not stat.S_ISDIR(found.st_mode):
            raise NotSavedError(f"{self.path} is no folder")
        _check_owner(found, str(self.path))


def _check_owner(found: os.stat_result, name: str) -> None:
    if not hasattr(os, "geteuid"):
        raise NotSavedError("this system does not say who may write a file")
    if found.st_uid != os.geteuid():
        raise NotSavedError(f"{name} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotSavedError(f"other users can write {name}; chmod go-w removes that")


def _content(path: Path) -> bytes | None:
    """The file's bytes, if it is ours; the open file is checked, not its name."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise NotSavedError(f"{path} is no file")
            _check_owner(found, str(path))
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotSavedError(f"{path} cannot be read: {error}") from error


def _entry(content: bytes) -> Entry:
    first, _, rest = content.partition(b"\n")
    digest, _, body = rest.partition(b"\n")
    if first != FORMAT:
        raise NotSavedError("the file has another format")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise NotSavedError("the file is damaged")
    line, _, blob = body.partition(b"\n")
    pieces, begin = [], 0
    try:
        header = json.loads(line)
        for length in header["lengths"]:
            pieces.append(blob[begin : begin + length])
            begin += length
    except (ValueError, KeyError, TypeError) as error:
        raise NotSavedError(f"the file has another format: {error!r}") from error
    return Entry(header, pieces)
