"""What is asked of the figures of `benchmarks.attention`, and whether they meet it.

A bar without its figures, because a backend or a shape was not measured, is neither met nor missed.
"""

from collections.abc import Iterator, Sequence

from benchmarks.attention_cases import Row
from benchmarks.direct import DIRECT
from benchmarks.harness import Bar

TRITON_AGAINST_FA3 = {"64x8192": (">=", 0.90), "8x4096": (">", 1.0), "1x32768": (">", 1.0),
                      "1x1024": (">", 1.0)}  # fmt: skip
"""FA3's time by TRITON's."""
PREFILL_AGAINST_FA3 = 0.70
OPERATOR, DEFAULT = 0.98, 0.98
OVERHEAD_US = 12.0


def all_bars(rows: Sequence[Row], overhead: Sequence[dict]) -> list[Bar]:
    """Every bar that the measured shapes have."""
    return [
        *operator_bars(rows),
        *default_bars(rows),
        *triton_bars(rows),
        *(
            Bar(f"host overhead, us: {o['backend']} {o['dtype']}", "<=", OVERHEAD_US,
                o.get("difference_us"))
            for o in overhead
            if "ours_us" in o and o["backend"] in DIRECT
        ),
    ]  # fmt: skip


def operator_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """The operator costs next to nothing over its library, in a graph; eager rows have no bar."""
    for row in rows:
        if row.ours_us is not None and row.captured and row.backend in DIRECT:
            what = f"direct / operator: {row.backend} {row.dtype} {row.shape}"
            yield Bar(what, ">=", OPERATOR, row.ratio)


def default_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """The backend that `select_backend` chooses is about the best of all that compute the same."""
    for dtype, shape in dict.fromkeys((row.dtype, row.shape) for row in rows):
        here = [r for r in rows if (r.dtype, r.shape) == (dtype, shape)]
        chosen = next((r for r in here if r.default), None)
        candidates = [
            r for r in here if r.ours_us is not None and (r.default or not r.quantizes_query)
        ]
        measured = None
        best = min(candidates, key=lambda r: r.ours_us or 0.0, default=None)
        if chosen is not None and chosen.ours_us and best is not None and best.ours_us:
            measured = best.ours_us / chosen.ours_us
        names = f"{best.backend if best else '-'} / {chosen.backend if chosen else '-'}"
        yield Bar(f"best / default: {names} {dtype} {shape}", ">=", DEFAULT, measured)


def triton_bars(rows: Sequence[Row], dtype: str = "bf16") -> Iterator[Bar]:
    """TRITON against FA3, called directly where that was measured.

    A model's layers share one launch of FA3's scheduler; the second bar counts it once for the
    layers that were measured together.
    """
    times = {(r.backend, r.shape): r for r in rows if r.dtype == dtype}
    for shape, kind in dict.fromkeys((r.shape, r.kind) for r in times.values()):
        fa3, triton = times.get(("FLASH_ATTN", shape)), times.get(("TRITON", shape))
        if kind == "prefill":
            relation, asked = ">=", PREFILL_AGAINST_FA3
        elif shape in TRITON_AGAINST_FA3:
            relation, asked = TRITON_AGAINST_FA3[shape]
        else:
            continue
        ours = triton.ours_us if triton else None
        alone = (fa3.direct_us or fa3.ours_us) if fa3 else None
        yield Bar(f"FA3 / TRITON: {dtype} {shape}", relation, asked, quotient(alone, ours))
        if shape == "1x1024":
            planned = quotient(fa3.planned_us if fa3 else None, ours)
            yield Bar(f"FA3 with its scheduler / TRITON: {dtype} {shape}", relation, asked, planned)


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None
