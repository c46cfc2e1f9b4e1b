"""Layers in a timeline: the sequence of kernels that repeats as often as the model has layers."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Kernels `begin` to `begin + number * length`, a repeat after the other."""

    begin: int
    length: int
    number: int

    def layer_of(self, place: int, num_layers: int) -> int | None:
        """The layer of a kernel; None before the first and after the last.

        Where a repeat holds several layers, it is shared out evenly.
        """
        inside = place - self.begin
        if not 0 <= inside < self.length * self.number:
            return None
        return inside * num_layers // (self.length * self.number)


def repeats(names: Sequence[str], num_layers: int) -> Repeats | None:
    """The longest sequence that comes once a layer, else once for 2 layers, and so on.

    None where nothing repeats.
    """
    for number in (n for n in range(num_layers, 1, -1) if num_layers % n == 0):
        for length in range(len(names) // number, 0, -1):
            begin = _run(names, length, length * (number - 1))
            if begin is not None:
                return Repeats(begin, length, number)
    return Repeats(0, len(names), 1) if num_layers == 1 and names else None


def _run(names: Sequence[str], length: int, wanted: int) -> int | None:
    """Where `wanted` names in a row come again `length` later."""
    run = 0
    for i in range(len(names) - length):
        run = run + 1 if names[i] == names[i + length] else 0
        if run == wanted:
            return i - wanted + 1
    return None
