"""Parts of a dump that may fail: the rest of it, and what the user runs, go on."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from fx_passes.observe import Draw
from graphs.dumps.folder import LinkError

logger = logging.getLogger(__name__)


class Attempts:
    """Calls parts of a dump.

    Attributes:
        notes: for the index; what failed is added.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []

    def guarded(self, what: str, function: Callable[..., Any], default: Any) -> Callable[..., Any]:
        """`function`; where it raises, it warns, notes that and returns `default`.

        Raises:
            LinkError: something would be written through a symbolic link.
        """

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except LinkError:
                raise
            except Exception as error:
                line = " ".join(str(error).split()) or "no message"
                note = f"left out of the dump: {what}: {type(error).__name__}: {line}"
                if note not in self.notes:
                    logger.warning(note)
                    self.notes.append(note)
                return default

        return call

    def drawing(self, draw: Draw) -> Draw:
        """`draw`, which draws nothing where it raises, at once or after a pass."""

        def guarded(graph: Any) -> Any:
            finish = self.guarded("picture of a graph", draw, None)(graph)
            return finish and self.guarded("picture of a graph", finish, None)

        return guarded
