"""Times an attention backend beside TORCH and TRITON: `attn-ops bench`.

For authors of kernels. Random layers of one geometry outgrow the L2 cache and run in one CUDA graph
where the backend can be captured; backends take turns. Decodes are also given in percent of the
copy bandwidth, keys and values read once.
"""

import dataclasses
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_ops import AttentionSpec, get_backend
from attn_ops.backends.measure import MeasuredShape, interval_us, measure
from graphs.app.presets import DTYPES
from graphs.app.run import device_of
from graphs.sampling.params import check_positive

BESIDE = ("TRITON", "TORCH")

SHAPES = {"cuda": ("64x8192", "8x4096", "1x1024", "2048"), "cpu": ("2x64", "32")}
HEADS = {"cuda": (32, 8, 128), "cpu": (4, 2, 64)}


@dataclasses.dataclass(frozen=True)
class Timed:
    """One backend at one shape."""

    backend: str
    shape: str
    us: float | None  # microseconds a layer; None: it cannot run, see `reason`
    percent: float | None = None  # of the copy bandwidth; None: of a prompt
    reason: str | None = None


def bench(
    backend: str,
    shapes: list[str],
    *,
    dtype: str | None = None,
    heads: str | None = None,
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    device: str | None = None,
) -> list[Timed]:
    """Time a backend, TRITON and TORCH.

    Args:
        backend: its name; one of a third party is registered by an entry point.
        shapes: REQUESTSxCONTEXT of decodes, TOKENS of one prompt; none: `SHAPES`.
        dtype: of queries; None: bfloat16, on a CPU float32.
        heads: query heads, kv heads and head size as "32,8,128"; None: `HEADS`.
        kv_cache_dtype: of an `AttentionSpec`.
        block_size: tokens a block of the cache holds.
        device: None: a GPU if there is one.

    Raises:
        ValueError: an argument is out of range.
    """
    get_backend(backend)  # raises where there is none
    check_positive(block_size=block_size)
    where = device_of(device)
    wanted = [(text, shape_of(text)) for text in shapes or SHAPES[where.type]]
    dtype = ("float32" if where.type == "cpu" else "bfloat16") if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be known, got {dtype!r}; supported: {', '.join(DTYPES)}")
    sizes = HEADS[where.type] if heads is None else heads_of(heads)
    spec = AttentionSpec(*sizes, getattr(torch, dtype), kv_cache_dtype=kv_cache_dtype)
    rate = copy_rate(where)
    return [
        row
        for text, shape in wanted
        for row in _timed(backend, spec, text, shape, block_size, where, rate)
    ]


def _timed(
    backend: str,
    spec: AttentionSpec,
    text: str,
    shape: MeasuredShape,
    block_size: int,
    device: torch.device,
    rate: float,
) -> list[Timed]:
    names = dict.fromkeys((backend, *BESIDE))
    reasons = {
        name: "; ".join(get_backend(name).reasons_against(spec, block_size, device))
        for name in names
    }
    able = [get_backend(name) for name, reason in reasons.items() if not reason]
    found = measure(able, [spec], block_size, device, [shape.lengths()])
    reasons |= found.failed
    kv_bytes = 2 * spec.num_kv_heads * spec.head_size * spec.cache_dtype.itemsize
    kv_bytes *= shape.num_reqs * shape.seq_len
    rows = []
    for name in names:
        us = found.times.get(name, [None])[0]
        percent = None
        if us is not None and shape.query_len == 1:
            percent = 100 * kv_bytes / (us * 1e-6) / rate
        rows.append(Timed(name, text, us, percent, None if us is not None else reasons[name]))
    return rows


def shape_of(text: str) -> MeasuredShape:
    """Of "64x8192", decodes; of "2048", one prompt."""
    try:
        numbers = [int(part) for part in text.split("x")]
        requests, context = numbers if len(numbers) == 2 else (1, *numbers)
        if min(requests, context) < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"shape must be REQUESTSxCONTEXT or TOKENS, got {text!r}") from None
    return MeasuredShape(requests, 1 if len(numbers) == 2 else context, context)


def heads_of(text: str) -> tuple[int, int, int]:
    """Of "32,8,128"."""
    try:
        query, kv, size = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"heads must be as '32,8,128', got {text!r}") from None
    return query, kv, size


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy that outgrows the caches."""
    source = torch.empty(
        2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    best = min(interval_us(lambda: target.copy_(source), device) for _ in range(9))
    return 2 * source.numel() / best * 1e6


def print_bench(rows: list[Timed], console: Console) -> None:
    """A table, a row a shape and backend."""
    table = Table(title="microseconds a layer", title_justify="left")
    for name in ("shape", "backend", "us", "% of copy bandwidth", ""):
        table.add_column(name, overflow="fold")
    last = None
    for row in rows:
        us = "-" if row.us is None else f"{row.us:.1f}"
        percent = "" if row.percent is None else f"{row.percent:.0f}"
        shape = "" if row.shape == last else row.shape
        table.add_row(shape, row.backend, us, percent, row.reason or "")
        last = row.shape
    console.print(table)


def as_dicts(rows: list[Timed]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]
