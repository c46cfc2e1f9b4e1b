"""Interrupts at any line of chosen files."""

import sys
from collections.abc import Callable
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
        "requests/reservations",
        "requests/scheduled",
        "requests/scheduler",
        "requests/stream",
        "step/blocks",
        "step/tensors",
        "verify/model_state",
    )
)
"""What a step of a session runs on the host, but for the making of graphs."""

CACHE = ("attn_ops/kv_cache.py", "attn_ops/block_pool.py")

SHARING = (*SESSION, *CACHE, "attn_ops/prefixes.py", "graphs/verify/weight_versions.py")
"""The same of sessions whose requests share prefixes."""

CALLS = (*SESSION, *CACHE, "graphs/requests/book.py")
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

    def __call__(self, frame, event, argument):
        found = [name for name in self.files if frame.f_code.co_filename.endswith(name)]
        self.seen.update(found)
        return self.line if found else None

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
