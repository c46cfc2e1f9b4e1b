"""What was predicted of the figures of `benchmarks.graphs`, what is asked of them, and verdicts.

Both are for the 8B shape at 1024 tokens on one H200, and for nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.graphs_steps import Captures, Row
from benchmarks.harness import Bar

LAYERS, CONTEXT, NUM_GRAPHS = 32, 1024, 35
BUSY, OVER_REPLAY, MANY_STEPS = 0.05, 1.01, 8
GAP_US, GAP_BATCH = 100.0, 64
CAPTURE_SECONDS, CAPTURE_GIB = 5.0, 0.6
ADDRESS_CHECK_US = 20.0

REPLAY_MS = {1: 4.81, 8: 5.1, 64: 6.96, 256: 16.4}
"""By batch: of graphs before sampling and stop checks were in them (one H200, 2026-11-21)."""


def predicted(row: Row) -> dict[str, float]:
    """Figures as they were thought to be before anything was measured; by attributes of `Row`.

    A whole graph is launched while the one before it runs, so only the copy of the tokens stands
    between two launches. Around attention, every step is filled, planned and read by the host, and
    the device waits for that; its launches are thought to take 3 ms of Python.
    """
    if row.batch not in REPLAY_MS:
        return {}
    replay_ms, whole = REPLAY_MS[row.batch], row.mode != "PIECEWISE"
    gap_us = 20 / row.decode_steps if whole else 300 + 4 * row.batch
    host_us = (
        60 + 40 / row.decode_steps + 1.5 * row.batch if whole else 3000 + 5 * row.batch
    )  # launch and address check; read tokens, per request
    return {
        "replay_ms": replay_ms,
        "wall_ms": replay_ms + gap_us / 1000,
        "gap_us": gap_us,
        "over_replay": 1 + gap_us / 1000 / replay_ms,
        "host_us": host_us,
        "busy": host_us / (1000 * replay_ms + gap_us),
    }


PREDICTED_CAPTURES = {"seconds": 4.0, "GiB": 0.45}
PREDICTED_CHECK_US = 12.0  # of all addresses


def all_bars(
    rows: Sequence[Row],
    captures: Sequence[Captures],
    address_check_us: Mapping[str, float],
    whole: bool,
) -> list[Bar]:
    """Every bar; `whole` False: the shape is another one, and nothing counts as measured.

    Graphs that are broken around attention have none but what they share with the others. Weights
    are no input of a step: they are looked at once a launch, not in every replay.
    """
    full = [row for row in rows if row.mode != "PIECEWISE"]
    return [
        *(bar for row in full for bar in many_steps_bars(row, whole)),
        gap_bar(full if whole else []),
        *capture_bars(captures, whole),
        Bar(
            "address check, us",
            "<=",
            ADDRESS_CHECK_US,
            address_check_us["without weights"] if whole else None,
        ),
    ]


def many_steps_bars(row: Row, whole: bool) -> Iterator[Bar]:
    """The host does next to nothing, and the device waits for nobody."""
    if row.decode_steps == MANY_STEPS:
        name = f"batch {row.batch}, {MANY_STEPS} steps"
        yield Bar(f"host busy: {name}", "<=", BUSY, row.busy if whole else None)
        over = row.over_replay if whole else None
        yield Bar(f"per token / replay: {name}", "<=", OVER_REPLAY, over)


def gap_bar(rows: Sequence[Row]) -> Bar:
    """Every token is read before the step behind the next one begins."""
    gaps = [r.gap_us for r in rows if (r.decode_steps, r.batch) == (1, GAP_BATCH)]
    what = f"gap between replays, us: batch {GAP_BATCH}, 1 step"
    return Bar(what, "<=", GAP_US, gaps[0] if gaps else None)


def capture_bars(captures: Sequence[Captures], whole: bool) -> Iterator[Bar]:
    """Of the session with all sizes; the device's bytes hold PyTorch's and the driver's."""
    found = [c for c in captures if c.num_graphs == NUM_GRAPHS and c.mode != "PIECEWISE"]
    seconds = found[0].seconds if found and whole else None
    num_bytes = found[0].device_bytes if found and whole else None
    gib = None if num_bytes is None else num_bytes / 2**30
    yield Bar(f"{NUM_GRAPHS} graphs, seconds", "<=", CAPTURE_SECONDS, seconds)
    yield Bar(f"{NUM_GRAPHS} graphs, GiB", "<=", CAPTURE_GIB, gib)
