"""Passes of installed packages: the entry-point group `attn_ops.passes`."""

import dataclasses
import functools
import warnings
from importlib.metadata import EntryPoint, entry_points

from fx_passes.base import Pass, check_pass

ENTRY_POINT_GROUP = "attn_ops.passes"


@dataclasses.dataclass
class Installed:
    """What installed packages offer.

    Attributes:
        waiting: passes that are loaded and not in the pipeline yet.
        broken: by entry point, why it is left out.
    """

    waiting: list[type[Pass]] = dataclasses.field(default_factory=list)
    broken: dict[str, str] = dataclasses.field(default_factory=dict)

    def leave_out(self, name: str, error: Exception) -> None:
        """Note and warn that an installed pass does not run; the others do."""
        self.broken[name] = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"the installed pass {name!r} is left out: {self.broken[name]}",
            RuntimeWarning,
            stacklevel=2,
        )


# Cached: a package is looked for and loaded once, and reported once if it is broken.
@functools.cache
def installed_passes() -> Installed:
    """Load the entry points of the group, in the order of their names."""
    found = Installed()
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        try:
            found.waiting.append(_load(point))
        except Exception as error:  # a third party's; it must not take the others with it
            found.leave_out(point.name, error)
    return found


def _load(point: EntryPoint) -> type[Pass]:
    new = point.load()
    check_pass(new)
    if new.name != point.name:
        raise ValueError(f"entry point must have its pass's name {new.name!r}, got {point.name!r}")
    return new
