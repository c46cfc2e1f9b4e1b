"""Passes of installed packages: the entry-point group `attn_ops.passes`."""

import dataclasses
import functools
import warnings
from importlib.metadata import EntryPoint, entry_points

from fx_passes.base import Pass
from fx_passes.declaration import check_pass

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

    def next_pass(self) -> type[Pass] | None:
        """Take one that stands beside none that waits. None: a cycle of them is left out."""
        waiting = {one.name: one for one in self.waiting}
        for one in self.waiting:
            if not waiting.keys() & _neighbours(one):
                self.waiting.remove(one)
                return one
        way = [self.waiting[0].name]
        while way[-1] not in way[:-1]:
            way += sorted(waiting.keys() & _neighbours(waiting[way[-1]]))[:1]
        cycle = way[way.index(way[-1]) :]
        error = f"runs_before and runs_after must form no cycle, got {' -> '.join(cycle)}"
        for name in cycle[1:]:
            self.waiting.remove(waiting[name])
            self.leave_out(name, ValueError(error))
        return None

    def leave_out(self, name: str, error: Exception) -> None:
        """Note and warn that an installed pass does not run; the others do."""
        self.broken[name] = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"the installed pass {name!r} is left out: {self.broken[name]}",
            RuntimeWarning,
            stacklevel=2,
        )


def _neighbours(one: type[Pass]) -> set[str | None]:
    """The passes that it stands beside."""
    return {one.runs_before, one.runs_after}


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
