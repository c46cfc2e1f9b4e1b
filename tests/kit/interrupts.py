"""Interrupts at any line of chosen files."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SESSION = tuple(
    f"graphs/{name}.py"
    for name in (
        "session",
        "loop",
        "ahead",
        "capture/recorder",
        "compilation",
        "runner",
        "requests/prefixes",
        "requests/requests",
        "requests/blocks",
        "requests/batch",
        "requests/scheduler",
        "requests/outputs",
        "step/blocks",
        "step/tensors",
        "model_changes",
    )
)
"""What a step of a session runs on the host, but for the making of graphs."""

CACHE = ("attn_ops/kv_cache.py", "attn_ops/block_pool.py")

SHARING = (*SESSION, *CACHE, "attn_ops/prefixes.py")
"""The same of sessions whose requests share prefixes."""

CALLS = (*SESSION, *CACHE, "graphs/requests/requests.py")
"""The same, and what queues requests."""


class Interrupt:
    """Raises at the n-th line that runs in some files; 0: counts them only.

    Attributes:
        num_lines: that have run.
        seen: files of which a function has run.
    """

    def __init__(self, at: int, files: tuple[str, ...] = (*SESSION, *CACHE)) -> None:
        self.at, self.files, self.num_lines = at, files, 0
        self.seen: set[str] = set()
        self._found: dict[str, tuple[str, ...]] = {}  # by path: every call of a function is traced

    def __call__(self, frame, event, argument):
        path = frame.f_code.co_filename
        if path not in self._found:
            self._found[path] = tuple(name for name in self.files if path.endswith(name))
            self.seen.update(self._found[path])
        return self.line if self._found[path] else None

    def line(self, frame, event, argument):
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                raise KeyboardInterrupt
        return self.line

    def during(self, run: Callable[[], Any]) -> Any:
        """What `run` returns; an empty list where it is interrupted."""
        before = sys.gettrace()  # that of a coverage run
        sys.settrace(self)
        try:
            return run()
        except KeyboardInterrupt:
            return []
        finally:
            sys.settrace(before)


Stepped = tuple[Interrupt, Any, Sequence[int], list[Any]]
"""An interrupt, a session at its end, its requests, and what its steps have returned."""


def stepped(
    begun: Callable[[], tuple[Any, Sequence[int]]], number: int, files: tuple[str, ...]
) -> Iterator[Stepped]:
    """Sessions that were stepped to their ends: one as it is, and some with an interrupt.

    Args:
        begun: makes a session, and ids of its requests.
        number: of random lines, each for another session.
        files: where those lines are; the session without an interrupt counts them.
    """
    count = Interrupt(0, files)
    session, ids = begun()
    yield count, session, ids, _outputs(session, count)
    for at in random.Random(0).sample(range(1, count.num_lines), number):
        interrupt = Interrupt(at, files)
        session, ids = begun()
        yield interrupt, session, ids, _outputs(session, interrupt)


def _outputs(session: Any, interrupt: Interrupt) -> list[Any]:
    outputs = []
    for _ in range(100):
        if session.num_unfinished:
            outputs += interrupt.during(session.step)
    return outputs
