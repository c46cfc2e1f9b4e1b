"""Whether attention writes FP8 faster itself than a kernel behind it, by the size of a batch."""

import dataclasses
import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

from attn_ops.backends.measure import MeasuredShape
from attn_ops.backends.measure_quant import Pair, pairs
from attn_ops.metadata import AttentionOptions, AttentionSpec
from attn_ops.output_quant.schemes import OutputQuant
from fx_passes.analysis.values import value_of

NOISE = 1.005
"""Times that differ by less are equal."""

MEASURED_ON = "NVIDIA H200"

_SIZES = (1, 8, 64, 256), (512, 2048)
"""Decodes at context 1,024, and tokens of one prompt, of the table."""

_TABLE: dict[str, tuple[tuple[float, float], ...]] = {
    "fp8_static": (
        (6.4, 8.4), (15.0, 17.6), (65.8, 67.0), (241.5, 246.0), (18.7, 20.1), (79.4, 81.2),
    ),
    "fp8_group128": (
        (6.4, 10.0), (15.5, 19.3), (66.4, 68.7), (243.4, 248.5), (19.2, 20.0), (79.5, 82.1),
    ),
    "fp8_group64": (
        (6.6, 9.2), (15.5, 19.9), (66.6, 69.5), (243.1, 248.3), (19.3, 22.7), (79.5, 91.9),
    ),
    "fp8_row": (
        (8.1, 9.3), (16.5, 18.2), (67.3, 67.0), (246.1, 245.2), (19.4, 21.0), (80.0, 86.1),
    ),
}  # fmt: skip
"""Microseconds a layer by AUTO: fused, and quantized by Inductor's kernel. 32 query and 8 KV heads
of 128 in bfloat16; one H200, 2026-11-23."""


class Gain(NamedTuple):
    """Microseconds of a layer: attention and its output in FP8."""

    batch: str  # requests x context, or the tokens of one prompt
    rows: int
    is_prompt: bool
    fused: float  # as `attention_quant` has it
    apart: float  # by a kernel behind attention

    @property
    def loses(self) -> bool:
        return self.fused > NOISE * self.apart

    @classmethod
    def of(cls, shape: MeasuredShape, pair: Pair) -> "Gain":
        prompt = shape.query_len > 1
        batch = str(shape.seq_len) if prompt else f"{shape.num_reqs}x{shape.seq_len}"
        return cls(batch, shape.num_reqs * shape.query_len, prompt, *pair)


def table(scheme: str) -> tuple[Gain, ...]:
    """What was measured of a scheme on `MEASURED_ON`."""
    decodes, prompts = _SIZES
    shapes = [MeasuredShape(rows, 1, 1024) for rows in decodes]
    shapes += [MeasuredShape(1, rows, rows) for rows in prompts]
    times = _TABLE.get(scheme)
    return tuple(map(Gain.of, shapes, (Pair(*t) for t in times))) if times else ()


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which batches a site's attention writes FP8 for itself.

    Attributes:
        source: where the times come from, or why there are none.
        gains: the times; where there are none, every batch is fused.
        missing: by batch, why it could not be timed.
    """

    source: str
    gains: tuple[Gain, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()

    @property
    def loses(self) -> bool:
        """Whether a kernel behind attention was faster at every size."""
        return bool(self.gains) and all(gain.loses for gain in self.gains)

    def keywords(self) -> dict[str, list[int]]:
        """Of the operator: which batches it leaves to a kernel behind; none where it need not."""
        turns = {
            "decodes_apart": _turns(gain for gain in self.gains if not gain.is_prompt),
            "prompts_apart": _turns(gain for gain in self.gains if gain.is_prompt),
        }
        return {name: rows for name, rows in turns.items() if rows}

    def decision(self) -> str:
        """`all batches`, or `all but decodes of 23 rows and more`."""
        apart = [
            f"{name.partition('_')[0]} of {_rows_in_words(rows)}"
            for name, rows in self.keywords().items()
        ]
        return f"all but {' and '.join(apart)}" if apart else "all batches"

    def reason(self) -> str:
        """`table of NVIDIA H200, us for those of a kernel behind: 8.1 for 9.3 at 1x1024, ...`."""
        shown = [f"{g.fused:.1f} for {g.apart:.1f} us at {g.batch}" for g in self.gains]
        shown += [f"none at {batch}, {why}" for batch, why in self.missing]
        return f"{self.source}: {', '.join(shown)}" if shown else self.source

    def facts(self) -> dict[str, Any]:
        times = [{"batch": g.batch, "fused": g.fused, "apart": g.apart} for g in self.gains]
        facts = {"decision": self.decision(), "reason": self.reason(), "times": times}
        return facts | self.keywords()


def _turns(gains: Iterable[Gain]) -> list[int]:
    """Numbers of rows from which on the other way is faster; the fused way comes first.

    Between two measured sizes it turns midway, on a logarithmic scale.
    """
    turns: list[int] = []
    apart, last = False, 0
    for gain in sorted(gains, key=lambda gain: gain.rows):
        if gain.loses != apart:
            turns.append(math.ceil(math.sqrt(last * gain.rows)))
            apart = gain.loses
        last = gain.rows
    return turns


def _rows_in_words(turns: list[int]) -> str:
    """`any number of rows`, `23 rows and more`, `0 to 22 and 724 rows and more`."""
    if turns == [0]:
        return "any number of rows"
    ends = [f"{end - 1} rows" for end in turns[1::2]] + [None]
    parts = zip(turns[::2], ends, strict=False)
    return " and ".join(f"{a} rows and more" if b is None else f"{a} to {b}" for a, b in parts)


def choose(
    attention: Node, how: OutputQuant, measurements: str | os.PathLike[str] | None
) -> Choice:
    """For a site of which a backend writes the scheme itself.

    Raises:
        ValueError: the file of measurements cannot be used.
    """
    if "v_head_dim" in attention.kwargs:
        return Choice("declared by a backend; latent attention is not measured")
    device = value_of(attention).device
    if device.type != "cuda" and measurements is None:
        return Choice(f"declared by a backend; nothing was measured on {device.type}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if name == MEASURED_ON and measurements is None:
        return Choice(f"table of {MEASURED_ON}", table(how.scheme))
    found = geometry_of(attention)
    if found is None:
        source = f"table of {MEASURED_ON}, as the cache's sizes are symbols"
        return Choice(source, table(how.scheme))
    gains, missing = [], []
    for shape, pair in pairs(found[0], how, found[1], device, measurements).items():
        gain = Gain.of(shape, Pair(0, 0) if isinstance(pair, str) else pair)
        if isinstance(pair, str):
            missing.append((gain.batch, pair))
        else:
            gains.append(gain)
    return Choice(f"measured on this {name}", tuple(gains), tuple(missing))


def geometry_of(attention: Node) -> tuple[AttentionSpec, int] | None:
    """Of the layer, and the block size of its cache; None where a size is a symbol."""
    q, cache = (value_of(cast(Node, node)) for node in attention.args[:2])
    if not all(type(size) is int for size in (*q.shape[1:], *cache.shape[2:])):
        return None
    asked: dict[str, Any] = dict(attention.kwargs)
    chunk, causal = asked.pop("attention_chunk_size", None), asked.pop("causal", None)
    asked.pop("logits_rows", None)
    spec = AttentionOptions(1.0, **asked).spec(q, cache, causal is not False)
    return dataclasses.replace(spec, attention_chunk_size=chunk), cache.shape[2]
