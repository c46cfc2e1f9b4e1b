"""What is asked of the figures of `benchmarks.workload`: for the 8B shape on one H200."""

from collections.abc import Iterator, Sequence

from benchmarks.figures import Bar
from benchmarks.workload.ours import Ours
from benchmarks.workload.theirs import Theirs

OVER_GPU, IDLE = 1.03, 0.025
OVER_BEST = 1.01
OVER_TRANSFORMERS = 4.0
MIXED = ("FULL", "FULL_AND_PIECEWISE")


def all_bars(rows: Sequence[Ours], theirs: Theirs | None, whole: bool) -> list[Bar]:
    """Every bar; `whole` False: the shape is another one, and nothing counts as measured."""
    return [
        *(bar for row in rows if row.mode == "FULL_DECODE_ONLY" for bar in own_bars(row, whole)),
        *mode_bars(rows, whole),
        *transformers_bars(rows, theirs, whole),
    ]


def own_bars(row: Ours, whole: bool) -> Iterator[Bar]:
    """The GPU has something to do all the time."""
    name = f"{row.mode}, {row.decode_steps} steps"
    yield Bar(f"wall / GPU time: {name}", "<=", OVER_GPU, row.over_gpu if whole else None)
    idle = row.idle.share if row.idle is not None and whole else None
    yield Bar(f"GPU idle: {name}", "<=", IDLE, idle)


def mode_bars(rows: Sequence[Ours], whole: bool) -> Iterator[Bar]:
    """Captured mixed steps cost nothing."""
    for row in rows:
        if row.mode in MIXED:
            best = min(r.wall_s for r in rows if r.decode_steps == row.decode_steps)
            name = f"{row.mode}, {row.decode_steps} steps"
            measured = row.wall_s / best if whole else None
            yield Bar(f"wall / best mode: {name}", "<=", OVER_BEST, measured)


def transformers_bars(rows: Sequence[Ours], theirs: Theirs | None, whole: bool) -> Iterator[Bar]:
    measured = None
    if theirs is not None and rows and whole:
        measured = theirs.wall_s / min(row.wall_s for row in rows)
    yield Bar("tokens/s over Transformers' continuous batching", ">=", OVER_TRANSFORMERS, measured)
